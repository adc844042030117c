"""`lorazor train`: from traces and rollouts to a policy artifact, with every baseline beside it.

The policies compared have learnt from the training requests (60 %) and are judged on test requests (20 %) that they
never saw. After that LightGBM is fitted on all of the requests, and this is the one that the artifact holds.
The artifact releases nothing yet: its thresholds are "never" until `tune` sets them on requests that it never saw.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from lorazor.features.errors import InputError
from lorazor.features.schema import FEATURES, REQUEST_FEATURES
from lorazor.policy.manifest import POLICY_FILE
from lorazor.training.baselines import ORACLE, ReleasePolicy, Score, simple_policies
from lorazor.training.compare import Comparison, compare
from lorazor.training.dataset import Dataset, prepare
from lorazor.training.labels import safe
from lorazor.training.learned import LEARNED, UNPROBED, WITHOUT_PROBES, fit_lightgbm, fit_logistic, lightgbm_policy
from lorazor.training.publish import AUTO, publish
from lorazor.training.reliability import reliability
from lorazor.training.replay import ReplayTable
from lorazor.training.report import TaskReport, TrainReport, note_one_class, note_probes, write_json
from lorazor.training.save import save
from lorazor.training.split import without
from lorazor.training.traces import ADAPTER_SIGNALS, PROBE_SIGNALS, TraceSet, read_traces
from lorazor.training.tracking import model_name

DROP_LIMITS = (0.01, 0.03)


def train(
    traces: TraceSet | str | Path,
    out: str | Path,
    *,
    probes: bool = True,
    seed: int = 0,
    leave_out: float = 0.0,
    threads: int = 1,
    drop_limits: Sequence[float] = DROP_LIMITS,
    mlflow_uri: str | None = AUTO,
    register_as: str | None = None,
    figures: str | Path | None = None,
    json_path: str | Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> TrainReport:
    """Train a policy on `traces`, compare it with every baseline and save it as the artifact folder `out`.

    Args:
        traces: a trace folder, or one that was read already.
        out: a new folder, or an older artifact to replace.
        probes: False: the policy looks at no probe, and a server of it makes none.
        seed: of the split, of LightGBM and of the random baseline.
        leave_out: share of the requests that are not looked at, so that they can calibrate and judge the policy.
        threads: for LightGBM; one is the safe choice: beside other work two spin at each other, ten times slower.
        drop_limits: drops allowed on validation at which the policies are compared on the test requests.
        mlflow_uri: a tracking store; AUTO is `tracking.default_uri()`, None is none.
        register_as: NAME or NAME@ALIAS in MLflow's registry.
        figures: a folder for the figures (they are logged to MLflow in any case).
        json_path: where to write `TrainReport.to_dict()`.
        progress: called with one line at the start of each stage.

    Raises:
        InputError: nothing to learn from (too few requests, one class only), or `out` or the store cannot be used.
    """
    started, out = time.monotonic(), Path(out)
    _check(out, mlflow_uri, register_as)
    progress("reading traces")
    if not isinstance(traces, TraceSet):
        traces = read_traces(traces)
    traces = traces.keep(without(traces.requests["request_id"], leave_out, seed=seed)) if leave_out else traces
    progress("features and split")
    data = prepare(traces, seed=seed)
    progress("LightGBM and the fitted baselines")
    policies = fit(data, seed=seed, threads=threads)
    name, columns = (LEARNED, FEATURES) if probes else (WITHOUT_PROBES, UNPROBED)
    score = next(policy.score for policy in policies if policy.name == name)
    progress("comparison on the test requests")
    comparisons = compare(policies, data.validation, data.test, drop_limits)
    tasks = {task: _task_report(data, task, comparisons[task], score) for task in data.test}
    progress("LightGBM on all requests")
    digest = traces.digest()
    # Its scores of these requests are nearer to 0 and 1 than those of others will be, so none of them may judge it.
    shipped = fit_lightgbm(data.whole, seed=seed, threads=threads, columns=columns)
    save(out, shipped, data, traces.meta, seed=seed, held_out=score, digest=digest, probes=probes)
    report = TrainReport(
        artifact=out,
        tasks=tasks,
        shipped=name,
        rounds=shipped.num_trees(),
        seconds=time.monotonic() - started,
        data_digest=digest,
        tracked=None,
        notes=(*note_one_class({task: r.safe_share for task, r in tasks.items()}), *note_probes(comparisons, probes)),
    )
    progress("figures and tracking")
    params = {
        "seed": seed,
        "leave_out": leave_out,
        "probe_interval": traces.meta.probe_interval,
        "probes": probes,
        "tasks": ",".join(tasks),
    }
    tracked = publish(report, data.test, score, params, mlflow_uri, register_as, figures)
    report = replace(report, tracked=tracked)
    if json_path is not None:
        write_json(Path(json_path), report)
    return report


def fit(data: Dataset, *, seed: int, threads: int = 1) -> list[ReleasePolicy]:
    """Every policy to compare, fitted on the training requests: the simplest first, LightGBM and the oracle last."""
    return [
        *simple_policies(seed, data.mean_output_tokens),
        lightgbm_policy("progress only", data, seed=seed, threads=threads, columns=REQUEST_FEATURES),
        ReleasePolicy(
            "logistic", fit_logistic(data.train, seed=seed), refit=lambda: fit_logistic(data.whole, seed=seed)
        ),
        lightgbm_policy(WITHOUT_PROBES, data, seed=seed, threads=threads, columns=UNPROBED),
        lightgbm_policy(LEARNED, data, seed=seed, threads=threads),
        ORACLE,
    ]


def _check(out: Path, mlflow_uri: str | None, register_as: str | None) -> None:
    """What would otherwise fail only after the work is done."""
    if register_as is not None:
        model_name(register_as)
        if mlflow_uri is None:
            raise InputError(f"registering as {register_as!r} needs an MLflow store")
    if out.exists() and not (out / POLICY_FILE).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} is in the way and is not a policy artifact; give another place")


def _task_report(data: Dataset, task: str, comparison: Comparison, score: Score) -> TaskReport:
    parts = {"train": data.train[task], "validation": data.validation[task], "test": data.test[task]}
    test, labels = data.test[task], safe(data.train[task])
    return TaskReport(
        requests={part: len(table) for part, table in parts.items()},
        safe_share=float(labels.mean()) if len(labels) else 0.0,
        missing_signals=_missing(data.train[task]),
        left_out=data.left_out[task],
        mean_output_tokens=data.mean_output_tokens[task],
        comparison=comparison,
        reliability=reliability(safe(test), score(test)),
    )


def _missing(table: ReplayTable) -> float:
    """Share of missing signals at decisions after admission (where all are missing by nature)."""
    names = [FEATURES.index(name) for name in (*ADAPTER_SIGNALS, *PROBE_SIGNALS)]
    after = table.features[table.step > 0][:, names]
    return float(np.isnan(after).mean()) if after.size else 0.0
