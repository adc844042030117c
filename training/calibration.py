"""What tune and evaluate share: an artifact and traces that fit each other, as replay tables with scores."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lorazor.features.errors import InputError
from lorazor.policy.artifact import Artifact, load_artifact
from lorazor.training.replay import Floats, ReplayTable
from lorazor.training.save import request_hash
from lorazor.training.traces import Meta, TraceSet, read_traces


@dataclass(frozen=True, eq=False)
class Scored:
    """One task's requests and the policy's score [D] at each of their decisions; `seen`: those that training had."""

    table: ReplayTable
    scores: Floats
    seen: tuple[str, ...] = ()

    def released_scores(self, thresholds: Floats) -> Floats:
        """R [n, k] at each of k thresholds; R = S where a request does not release."""
        outcomes = [self.table.outcome(self.table.first_decision(self.scores, float(t))).score for t in thresholds]
        return np.stack(outcomes, axis=1)


@dataclass(frozen=True, eq=False)
class Calibration:
    """A policy, and the tasks that it and the traces have in common; `unknown` tasks are in the traces alone."""

    artifact: Artifact
    traces: TraceSet
    tasks: dict[str, Scored]
    unknown: tuple[str, ...] = ()

    @property
    def meta(self) -> Meta:
        """What the traces were made from."""
        return self.traces.meta

    def grid(self, task: str) -> Floats:
        """The thresholds to test for a task, as training fixed them, the strictest (highest) first."""
        return np.array(sorted(set(self.artifact.manifest.threshold_grid.get(task, [])), reverse=True))


def calibration(
    ref: str | Path, traces_dir: str | Path, *, task: str | None = None, unseen_only: bool = False
) -> Calibration:
    """Load and match an artifact and a trace folder; with `task` that one only.

    `unseen_only` leaves out the requests that training saw.

    Raises:
        InputError: another base, probe interval or feature schema; an unknown task or adapter; no request is left.
    """
    traces = read_traces(traces_dir)
    artifact = load_artifact(ref, traces.meta.base.fingerprint, traces.meta.probe_interval)
    tasks, unknown = _tasks(artifact, traces, task)
    trained = set(artifact.manifest.trained_on)
    scored = {}
    for name in tasks:
        part = traces.select(name)
        _check_adapters(artifact, part, name)
        seen = [str(i) for i in part.requests["request_id"] if request_hash(i) in trained]
        if unseen_only and seen:
            part = part.keep(set(part.requests["request_id"]) - set(seen))
            if part.steps.empty:
                raise InputError(
                    f"task {name!r}: training saw all {len(seen)} of its requests, so none is left: collect others, or "
                    "train with --leave-out"
                )
            seen = []
        table = ReplayTable.from_traces(part, name, artifact.manifest.tasks[name].mean_output_tokens)
        scores = artifact.scorer.score(table.features) if len(table.step) else np.empty(0)
        scored[name] = Scored(table, scores, tuple(seen))
    return Calibration(artifact, traces, scored, unknown)


def _tasks(artifact: Artifact, traces: TraceSet, task: str | None) -> tuple[list[str], tuple[str, ...]]:
    """The tasks to use, and those of the traces that the policy does not know."""
    known = artifact.manifest.tasks
    if task is not None:
        if task not in known:
            raise InputError(f"task {task!r} is not one of the policy's: {', '.join(sorted(known)) or 'it has none'}")
        return [task], ()
    common = [t for t in traces.tasks if t in known]
    if not common:
        ours, theirs = ", ".join(sorted(known)) or "none", ", ".join(traces.tasks)
        raise InputError(f"no task in common: the policy knows {ours}, the traces hold {theirs}")
    return common, tuple(t for t in traces.tasks if t not in known)


def _check_adapters(artifact: Artifact, traces: TraceSet, task: str) -> None:
    """A policy never releases an adapter that it does not know, so numbers for one would be false."""
    prints = {a.name: a.fingerprint for a in traces.meta.adapters}
    known = ", ".join(f"{a.name} ({a.fingerprint[:16]}…)" for a in artifact.manifest.adapters) or "none"
    for name in traces.requests["adapter"].unique():
        if artifact.task_of(prints[name]) is None:
            raise InputError(
                f"task {task!r}: the traces' adapter {name!r} (fingerprint {prints[name][:16]}…) is unknown to the "
                f"policy, which knows {known}"
            )
