"""`lorazor evaluate`: an artifact, as it stands, replayed exactly over traces and rollouts; nothing is chosen here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lorazor.policy.manifest import TaskPolicy
from lorazor.training.calibration import Scored, calibration
from lorazor.training.pairs import Pairs, PairsReport, write_pairs
from lorazor.training.replay import LeftOut, Outcome, Summary, summarize
from lorazor.training.tune_report import percent, table, task_numbers, without_unknown, write_json


@dataclass(frozen=True)
class EvaluatedTask:
    """What the policy of one task did; `release_steps` maps each release step (None: never) to its requests."""

    policy: TaskPolicy
    overall: Summary
    solved: Summary | None
    release_steps: dict[int | None, int]
    left_out: LeftOut
    seen_in_training: int


@dataclass(frozen=True)
class EvaluateReport:
    """All evaluated tasks; `unknown` ones are in the traces, but the policy would never release them."""

    artifact: Path
    tasks: dict[str, EvaluatedTask]
    unknown: tuple[str, ...] = ()
    pairs: PairsReport | None = None

    def to_dict(self) -> dict[str, Any]:
        """The JSON of design.md; max_drop, confidence and bound are those that `tune` recorded."""
        return {"tasks": {name: _json(task) for name, task in self.tasks.items()}}

    def render(self) -> str:
        """The report as text, one block per task."""
        notes = [f"note: task {t!r} is unknown to the policy: never released, not counted here" for t in self.unknown]
        pairs = [self.pairs.render()] if self.pairs else []
        return "\n\n".join([*(_text(name, task) for name, task in self.tasks.items()), *notes, *pairs])


def evaluate(
    artifact_dir: str | Path,
    traces_dir: str | Path,
    *,
    task: str | None = None,
    unseen_only: bool = False,
    json_path: str | Path | None = None,
    pairs: Pairs | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> EvaluateReport:
    """Replay an artifact (a folder or `models:/name@alias`) over the traces of a folder.

    Args:
        task: this task only.
        unseen_only: leave out the requests that training saw; otherwise they are counted and flagged.
        json_path: where to write `EvaluateReport.to_dict()`.
        pairs: where to write texts for human preference.
        progress: called with one line per task.

    Raises:
        InputError: another base, g or schema, an unknown task or adapter, no requests, or what `write_pairs` refuses.
    """
    data = calibration(artifact_dir, traces_dir, task=task, unseen_only=unseen_only)
    tasks = {}
    for name, scored in data.tasks.items():
        progress(f"{name}: {len(scored.table):,} requests")
        tasks[name] = replayed(scored, data.artifact.manifest.tasks[name])
    written = write_pairs(pairs, data) if pairs is not None else None
    report = EvaluateReport(Path(artifact_dir), tasks, data.unknown, written)
    if json_path is not None:
        write_json(json_path, report.to_dict())
    return report


def replayed(scored: Scored, policy: TaskPolicy) -> EvaluatedTask:
    """What the threshold of `policy` gives on the requests of `scored`."""
    requests = scored.table
    outcome = requests.outcome(requests.first_decision(scored.scores, policy.threshold))
    return EvaluatedTask(
        policy=policy,
        overall=summarize(requests, outcome),
        solved=summarize(requests, outcome, solved_only=True) if requests.solved.any() else None,
        release_steps=_release_steps(outcome),
        left_out=requests.left_out,
        seen_in_training=len(scored.seen),
    )


def _release_steps(outcome: Outcome) -> dict[int | None, int]:
    steps, counts = np.unique(outcome.release[outcome.released], return_counts=True)
    found: dict[int | None, int] = {int(r): int(k) for r, k in zip(steps, counts, strict=True)}
    return {**found, None: int((~outcome.released).sum())}


def _json(task: EvaluatedTask) -> dict[str, Any]:
    g = task.policy.guarantee
    promise = {"max_drop": g.max_drop, "confidence": g.confidence, "bound": g.bound} if g else {}
    return without_unknown({"threshold": task.policy.threshold, **promise, **task_numbers(task.overall)})


def _text(name: str, task: EvaluatedTask) -> str:
    p, g, n = task.policy, task.policy.guarantee, task.overall.n
    head = "never release" if p.threshold is None else f"threshold {p.threshold:.4g}"
    lines = [f"Task {name}: {head}"]
    if g is not None:
        lines.append(
            f"guaranteed: {g.kind} drop <= {percent(g.max_drop)}, {g.confidence:.0%} confidence, from {g.n:,} requests"
        )
    if task.seen_in_training:
        lines.append(
            f"WARNING: training saw {task.seen_in_training:,} of these {n:,} requests (--unseen-only leaves them out)"
        )
    if task.left_out.differs or task.left_out.missing:
        lines.append(f"rollouts left out: {task.left_out.differs} differ by numerics, {task.left_out.missing} missing")
    lines += table(task.overall, task.solved)
    if p.threshold is not None:
        lines += ["release step    requests", *_histogram(task.release_steps, n)]
    return "\n  ".join(lines)


def _histogram(steps: dict[int | None, int], n: int, rows: int = 10) -> list[str]:
    """One bar per release step, neighbours together where there are more than `rows`; never comes last."""
    known = sorted(r for r in steps if r is not None)
    groups = np.array_split(np.array(known, dtype=np.int64), min(rows, len(known))) if known else []
    named = [(_span(int(g[0]), int(g[-1])), sum(steps[int(r)] for r in g)) for g in groups]
    bars = [*named, ("never", steps[None])]
    return [f"{name:>12}{count:>12,}  {'█' * round(40 * count / n)}" for name, count in bars]


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"
