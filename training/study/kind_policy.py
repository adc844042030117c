"""One policy for all adapters of a kind: what a server that holds them is started with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd

from lorazor.features.errors import InputError
from lorazor.policy.artifact import Artifact, load_artifact
from lorazor.training.losses import Kind
from lorazor.training.study.cells import Parts
from lorazor.training.study.layout import CALIBRATE, POLICY_TRAIN
from lorazor.training.traces import Meta, TraceSet, write_traces
from lorazor.training.train import train
from lorazor.training.tune import tune


def kind_policy(
    out: Path,
    parts: Sequence[Parts],
    *,
    kind: Kind,
    max_drop: float,
    confidence: float,
    seed: int,
    progress: Callable[[str], None],
) -> Artifact:
    """Train on the cells' training requests together, tune each task on its calibration requests; the artifact `out`.

    A task that `tune` refuses, as below the noise floor, never releases, which is told.

    Raises:
        InputError: there is nothing to learn from, or the cells are of different bases or probe intervals.
    """
    train(together([p.traces[POLICY_TRAIN] for p in parts]), out, seed=seed, mlflow_uri=None)
    for part in parts:
        with TemporaryDirectory() as folder:
            traces = part.traces[CALIBRATE]
            write_traces(folder, traces.steps, traces.rollouts, traces.meta)
            try:
                tune(out, folder, kind=kind, max_drop=max_drop, confidence=confidence, task=part.cell.task)
            except InputError as error:
                progress(f"  {part.cell} never releases: {error}")
    return load_artifact(out)


def together(sets: Sequence[TraceSet]) -> TraceSet:
    """The traces of several tasks as one set; InputError where they can have no policy in common."""
    meta = joined([traces.meta for traces in sets])
    steps, rollouts = (pd.concat(frames, ignore_index=True) for frames in _tables(sets))
    return TraceSet(steps, rollouts, meta)


def joined(metas: Sequence[Meta]) -> Meta:
    """The first one's, with the adapters, tasks and noise of all."""
    first = metas[0]
    for meta in metas[1:]:
        mine, other = ((m.base.fingerprint, m.probe_interval) for m in (first, meta))
        if mine != other:
            raise InputError(
                f"the tasks {', '.join(first.tasks)} and {', '.join(meta.tasks)} have no policy in common: their "
                f"traces must be of one base and probe interval, got {mine} and {other}"
            )
    return first.model_copy(
        update={
            "adapters": [adapter for meta in metas for adapter in meta.adapters],
            "tasks": {name: task for meta in metas for name, task in meta.tasks.items()},
            "noise": {name: noise for meta in metas for name, noise in meta.noise.items()},
        }
    )


def _tables(sets: Sequence[TraceSet]) -> tuple[list[pd.DataFrame], list[pd.DataFrame]]:
    return [traces.steps for traces in sets], [traces.rollouts for traces in sets]
