"""`lorazor train`: from traces and rollouts to a policy artifact, with every baseline beside it.

The artifact releases nothing yet: its thresholds are "never" until `tune` sets them on requests that it never saw.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import lightgbm as lgb
import numpy as np

from lorazor.features.errors import InputError
from lorazor.features.schema import FEATURES
from lorazor.policy.manifest import POLICY_FILE
from lorazor.training import tracking
from lorazor.training.baselines import ORACLE, ReleasePolicy, simple_policies
from lorazor.training.compare import Comparison, compare
from lorazor.training.dataset import Dataset, prepare
from lorazor.training.figures import draw_all
from lorazor.training.labels import safe
from lorazor.training.learned import PARAMS, fit_lightgbm, fit_logistic, fit_progress, predict
from lorazor.training.provenance import git_sha
from lorazor.training.reliability import reliability
from lorazor.training.replay import Ints, ReplayTable
from lorazor.training.report import TaskReport, TrainReport, note_one_class
from lorazor.training.save import save
from lorazor.training.traces import ADAPTER_SIGNALS, PROBE_SIGNALS, TraceSet

AUTO = "auto"
DROP_LIMITS = (0.01, 0.03)
LEARNED = "LightGBM"


def train(
    traces: TraceSet,
    out: str | Path,
    *,
    seed: int = 0,
    threads: int = 1,
    drop_limits: Sequence[float] = DROP_LIMITS,
    mlflow_uri: str | None = AUTO,
    register_as: str | None = None,
    figures: str | Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> TrainReport:
    """Train a policy on `traces`, compare it with every baseline and save it as the artifact folder `out`.

    Args:
        seed: of the split, of LightGBM and of the random baseline.
        threads: for LightGBM; one is the safe choice: beside other work two spin at each other, ten times slower.
        drop_limits: drops allowed on validation at which the policies are compared on the test requests.
        mlflow_uri: a tracking store; AUTO is `tracking.default_uri()`, None is no tracking.
        register_as: NAME or NAME@ALIAS in MLflow's registry.
        figures: a folder for the figures (they are logged to MLflow in any case).
        progress: called with one line at the start of each stage.

    Raises:
        InputError: nothing to learn from (too few requests, one class only), or `out` or the store cannot be used.
    """
    started, out = time.monotonic(), Path(out)
    _check(out, mlflow_uri, register_as)
    progress("features and split")
    data = prepare(traces, seed=seed)
    progress("LightGBM and the fitted baselines")
    booster, policies = fit(data, seed=seed, threads=threads)
    progress("comparison on the test requests")
    comparisons = compare(policies, data.validation, data.test, drop_limits)
    tasks = {task: _task_report(data, task, comparisons[task], booster, threads) for task in data.test}
    digest = traces.digest()
    save(out, booster, data, traces.meta, seed=seed, threads=threads, digest=digest)
    report = TrainReport(
        artifact=out,
        tasks=tasks,
        rounds=booster.num_trees(),
        seconds=time.monotonic() - started,
        data_digest=digest,
        tracked=None,
        notes=note_one_class({task: r.safe_share for task, r in tasks.items()}),
    )
    progress("figures and tracking")
    with tempfile.TemporaryDirectory() as spare:
        drawn = Path(figures or spare)
        releases = {task: _releases(data.test[task], tasks[task].comparison, booster, threads) for task in tasks}
        draw_all(drawn, comparisons, releases, {task: r.reliability for task, r in tasks.items()})
        if mlflow_uri is None:
            return report
        uri = tracking.default_uri() if mlflow_uri == AUTO else mlflow_uri
        params = {**PARAMS, "seed": seed, "probe_interval": traces.meta.probe_interval, "tasks": ",".join(tasks)}
        tracked = tracking.track(
            uri,
            artifact=out,
            figures=drawn,
            params=params,
            metrics=report.metrics(),
            tags={"data_digest": digest, "git": git_sha()},
            report=report.render(),
            register_as=register_as,
        )
    return replace(report, tracked=tracked)


def fit(data: Dataset, *, seed: int, threads: int) -> tuple[lgb.Booster, list[ReleasePolicy]]:
    """The policy's LightGBM, and every policy to compare, simplest first, LightGBM and the oracle last."""
    booster = fit_lightgbm(data, seed=seed, threads=threads)
    policies = [
        *simple_policies(seed, data.mean_output_tokens),
        ReleasePolicy("progress only", fit_progress(data, seed=seed, threads=threads)),
        ReleasePolicy("logistic", fit_logistic(data, seed=seed)),
        ReleasePolicy(LEARNED, lambda table: predict(booster, table.features, threads)),
        ORACLE,
    ]
    return booster, policies


def _check(out: Path, mlflow_uri: str | None, register_as: str | None) -> None:
    """What would only fail after the work is done."""
    if register_as is not None:
        tracking.model_name(register_as)
        if mlflow_uri is None:
            raise InputError(f"registering as {register_as!r} needs an MLflow store")
    if out.exists() and not (out / POLICY_FILE).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} is in the way and is not a policy artifact; give another place")


def _task_report(data: Dataset, task: str, comparison: Comparison, booster: lgb.Booster, threads: int) -> TaskReport:
    parts = {"train": data.train[task], "validation": data.validation[task], "test": data.test[task]}
    test, labels = data.test[task], safe(data.train[task])
    return TaskReport(
        requests={part: len(table) for part, table in parts.items()},
        safe_share=float(labels.mean()) if len(labels) else 0.0,
        missing_signals=_missing(data.train[task]),
        left_out=data.left_out[task],
        mean_output_tokens=data.mean_output_tokens[task],
        comparison=comparison,
        reliability=reliability(safe(test), predict(booster, test.features, threads)),
    )


def _missing(table: ReplayTable) -> float:
    """Share of missing signals at decisions after admission (where all are missing by nature)."""
    names = [FEATURES.index(name) for name in (*ADAPTER_SIGNALS, *PROBE_SIGNALS)]
    after = table.features[table.step > 0][:, names]
    return float(np.isnan(after).mean()) if after.size else 0.0


def _releases(table: ReplayTable, comparison: Comparison, booster: lgb.Booster, threads: int) -> tuple[Ints, Ints]:
    """Release steps and decisions of the test requests at the last (widest) operating point of the learned policy."""
    threshold = [row.threshold for row in comparison.rows if row.policy == LEARNED][-1]
    decision = table.first_decision(predict(booster, table.features, threads), threshold)
    return table.outcome(decision).release, decision
