"""What `lorazor train` found: as an object, as JSON and as the text that it prints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from lorazor.training.compare import Comparison, Row
from lorazor.training.learned import LEARNED, WITHOUT_PROBES
from lorazor.training.provenance import atomic_write_text
from lorazor.training.reliability import Reliability
from lorazor.training.replay import LeftOut, Summary
from lorazor.training.tracking import Tracked

PROBES_PAY = 0.02
"""Probes pay where a policy without them holds so much more of the rows: they cost a server 3 to 7 % (docs/gpu.md)."""
COLUMNS = ("share", "drop", "length ratio", "share, all", "drop, all")


@dataclass(frozen=True, eq=False)
class TaskReport:
    """One task: how many requests went where, the share of safe labels, left-out rollouts and all comparisons."""

    requests: dict[str, int]
    safe_share: float
    missing_signals: float
    left_out: LeftOut
    mean_output_tokens: float
    comparison: Comparison
    reliability: Reliability


@dataclass(frozen=True, eq=False)
class TrainReport:
    """The result of a training run; `tracked` is None without MLflow.

    `tasks` is of policies that had not seen the test requests. The artifact's model, of `rounds` trees, has; `shipped`
    is its name among them.
    """

    artifact: Path
    tasks: dict[str, TaskReport]
    shipped: str
    rounds: int
    seconds: float
    data_digest: str
    tracked: Tracked | None
    notes: tuple[str, ...] = ()

    def render(self) -> str:
        """The report as text, one block per task."""
        blocks = [_task_text(task, report) for task, report in self.tasks.items()]
        notes = [f"note: {note}" for note in self.notes]
        return "\n\n".join([*blocks, "\n".join([*notes, self._closing()])])

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: per task the rows, areas and reliability (no curves)."""
        tracked = asdict(self.tracked) if self.tracked else None
        return {
            "artifact": str(self.artifact),
            "data_digest": self.data_digest,
            "shipped": self.shipped,
            "rounds": self.rounds,
            "seconds": self.seconds,
            "mlflow": tracked,
            "notes": list(self.notes),
            "tasks": {task: _task_dict(report) for task, report in self.tasks.items()},
        }

    def metrics(self) -> dict[str, float]:
        """Flat numbers for MLflow: TASK/POLICY/WHAT, nulls left out."""
        flat: dict[str, float] = {"rounds": self.rounds, "seconds": self.seconds}
        for task, report in self.tasks.items():
            if report.reliability.n:
                flat[f"{task}/brier"] = report.reliability.brier
            for row in report.comparison.rows:
                at = f"{task}/{row.policy}" + ("" if row.limit is None else f"/drop_{row.limit:g}")
                values = {} if row.judged is None else {"share": row.judged.active_row_share, "drop": row.judged.drop}
                flat |= {f"{at}/{name}": value for name, value in values.items() if value is not None}
            flat |= {f"{task}/{p}/area": a for p, a in report.comparison.area.items() if a is not None}
        return flat

    def _closing(self) -> str:
        n = sum(sum(report.requests.values()) for report in self.tasks.values())
        lines = [
            f"the policies above learnt from the training requests; the artifact's from all {n:,}",
            f"policy artifact: {self.artifact} (`{self.shipped}`, {self.rounds} trees, {self.seconds:.1f} s)",
            "it never releases until `lorazor tune` sets thresholds",
        ]
        if self.tracked:
            lines.append(f"MLflow run {self.tracked.run_id} in {self.tracked.uri}")
            lines += [f"registered as {self.tracked.model}"] if self.tracked.model else []
        return "\n".join(lines)


def _task_dict(report: TaskReport) -> dict[str, Any]:
    measured = report.reliability
    return {
        "requests": report.requests,
        "safe_share": report.safe_share,
        "missing_signals": report.missing_signals,
        "left_out": asdict(report.left_out),
        "mean_output_tokens": report.mean_output_tokens,
        "q_base": report.comparison.never.everything.q_base,
        "q_adapter": report.comparison.never.everything.q_adapter,
        "policies": [asdict(row) for row in report.comparison.rows],
        "area": report.comparison.area,
        "reliability": {
            "brier": measured.brier if measured.n else None,
            "predicted": measured.predicted.tolist(),
            "observed": measured.observed.tolist(),
        },
    }


def _task_text(task: str, report: TaskReport) -> str:
    never, left_out = report.comparison.never, report.left_out
    base, solved = never.everything, never.judged.n if never.judged else 0
    counts = ", ".join(f"{n} {part}" for part, n in report.requests.items())
    lines = [
        f"task {task}: requests {counts}; mean output {report.mean_output_tokens:.1f} tokens",
        f"  test requests: Q_base {base.q_base:.3f}, Q_adapter {base.q_adapter:.3f}, {solved} of {base.n} with S > 0",
        f"  training decisions: {report.safe_share:.1%} safe, {report.missing_signals:.1%} of the signals missing; "
        f"Brier score {report.reliability.brier:.3f}",
        f"  rollouts left out: {left_out.differs} differing, {left_out.missing} missing",
        f"  {'':<16}{'drop <=':>8}" + "".join(f"{name:>14}" for name in (*COLUMNS, "area")),
    ]
    areas = dict(report.comparison.area)
    lines += [_row_text(row, areas.pop(row.policy, None)) for row in report.comparison.rows]
    return "\n".join([*lines, "  share, drop and area over requests with S > 0, then over all; - is null"])


def _row_text(row: Row, area: float | None) -> str:
    limit = "" if row.limit is None else f"{row.limit:.1%}"
    cells = [*_cells(row.judged, 3), *_cells(row.everything, 2), "" if area is None else f"{area:.3f}"]
    return f"  {row.policy:<16}{limit:>8}" + "".join(f"{cell:>14}" for cell in cells)


def _cells(summary: Summary | None, n: int) -> list[str]:
    if summary is None:
        return ["-"] * n
    drop = "-" if summary.drop is None else f"{summary.drop:.2%}"
    return [f"{summary.active_row_share:.3f}", drop, f"{summary.length_ratio:.3f}"][:n]


def write_json(path: Path, report: TrainReport) -> None:
    """`TrainReport.to_dict()` as a JSON file, atomically."""
    atomic_write_text(path, json.dumps(report.to_dict(), indent=2, allow_nan=False) + "\n")


def note_one_class(safe_shares: Mapping[str, float]) -> tuple[str, ...]:
    """A sentence for every task whose training labels are all of one class (other tasks still teach the policy)."""
    return tuple(
        f"task {task!r}: every training label is {'safe' if share else 'unsafe'}"
        for task, share in safe_shares.items()
        if share in (0.0, 1.0)
    )


def note_probes(comparisons: Mapping[str, Comparison], probes: bool) -> tuple[str, ...]:
    """A sentence where the other choice of `probes` is the better one, by the mean share of all tasks and limits."""
    probed, unprobed = (_mean_share(comparisons, name) for name in (LEARNED, WITHOUT_PROBES))
    if probed is None or unprobed is None or probes == (unprobed - probed >= PROBES_PAY):
        return ()
    found = f"on average a policy without probes holds {unprobed:.1%} of the rows, one with probes {probed:.1%}"
    advice = "--without-probes costs a server less" if probes else "probes are worth their price here"
    return (f"{found}: {advice}",)


def _mean_share(comparisons: Mapping[str, Comparison], policy: str) -> float | None:
    rows = [row for comparison in comparisons.values() for row in comparison.rows if row.policy == policy]
    shares = [row.judged.active_row_share for row in rows if row.judged is not None]
    return fmean(shares) if shares else None
