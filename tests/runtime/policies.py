"""Small policy artifacts for runtime tests: real LightGBM models whose decisions are known in advance."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import numpy.typing as npt
import torch

from lorazor.features.schema import FEATURES, PROBE_FEATURES, SCHEMA_HASH
from lorazor.policy.artifact import Artifact, save_artifact
from lorazor.policy.fingerprint import fingerprint
from lorazor.policy.manifest import AdapterEntry, Manifest, TaskPolicy
from lorazor.runtime.guard import GuardedScorer
from tests.runtime.tiny import Tiny

PROBE_INTERVAL = 4


def safe_from_step(step: int, seed: int = 0) -> str:
    """A model's text: its score is high from decision step `step` on, low before and at admission (step 0)."""
    return safe_from("step", np.arange(64), step, seed)


def safe_from(feature: str, values: Sequence[float] | npt.NDArray[Any], least: float, seed: int = 0) -> str:
    """A model's text: its score is high where the feature, drawn from `values`, is at least this; no probe counts."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(4000, len(FEATURES)))
    x[:, [FEATURES.index(name) for name in PROBE_FEATURES]] = np.nan
    at = FEATURES.index(feature)
    x[:, at] = rng.choice(values, len(x))
    params = {"objective": "binary", "verbose": -1, "num_leaves": 4, "min_data_in_leaf": 20, "num_threads": 1}
    data = lightgbm.Dataset(x, (x[:, at] >= least).astype(int), feature_name=list(FEATURES))
    return str(lightgbm.train(params, data, num_boost_round=50).model_to_string())


def make_policy(folder: Path, tiny: Tiny, model: str, threshold: float | None = 0.9, probes: bool = True) -> str:
    """An artifact that knows adapters a and b; the task "open" has the threshold, "closed" none."""
    prints = {name: fingerprint(tiny.adapters[name]) for name in "ab"}
    return str(save_policy(folder, model, fingerprint(tiny.base), prints, threshold, probes).path)


def save_policy(
    folder: Path,
    model: str,
    base: str,
    adapters: dict[str, str],
    threshold: float | None = 0.9,
    probes: bool = True,
) -> Artifact:
    """An artifact that knows adapters by these fingerprints."""
    manifest = Manifest(
        schema_hash=SCHEMA_HASH,
        features=list(FEATURES),
        probe_interval=PROBE_INTERVAL,
        probes=probes,
        base_fingerprint=base,
        adapters=[AdapterEntry(name=name, fingerprint=print_, task="open") for name, print_ in adapters.items()],
        tasks={
            "open": TaskPolicy(threshold=threshold, mean_output_tokens=20.0),
            "closed": TaskPolicy(threshold=None, mean_output_tokens=20.0),
        },
    )
    return save_artifact(folder, manifest, model)


def break_policy(worker: Any, kind: str) -> None:
    """Make every call of the policy fail in one way ("exception", "nan" or "shape") until it is mended.

    Where it runs on the device (model runner V2), its calls at admission are still the host's.
    """

    def score(features: Any, *_: Any) -> Any:
        if kind == "exception":
            raise ValueError("broken")
        return np.full(len(features) + (kind == "shape"), np.nan)

    followed, device = worker.core.followed, getattr(worker.model_runner, "device_policy", None)
    followed.score = GuardedScorer(score, 5.0, followed.score._on_failure)
    if device is not None:
        # No graph has it, and a copy of the wrong shape fails.
        device.score = lambda signals, probes, windows, out: out is None or out.copy_(torch.from_numpy(score(signals)))
        worker.model_runner.device_step.graphs, device.graphs = {}, worker.model_runner.device_step.graphs


def mend_policy(worker: Any) -> None:
    """Put the policy back."""
    core, device = worker.core, getattr(worker.model_runner, "device_policy", None)
    core.followed.score = GuardedScorer(core.artifact.scorer.score, 5.0, core.followed.score._on_failure)
    if device is not None:
        vars(device).pop("score", None)
        worker.model_runner.device_step.graphs = vars(device).pop("graphs", worker.model_runner.device_step.graphs)
