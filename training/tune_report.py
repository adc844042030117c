"""What `lorazor tune` found: as objects, as the JSON of design.md and as the text that it prints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorazor.features.errors import InputError
from lorazor.training.losses import Kind
from lorazor.training.provenance import atomic_write_text
from lorazor.training.replay import LeftOut, Summary

PROMISE = {
    "relative": "the score lost to releasing is at most {} of the never-released score",
    "net": "the mean score falls by at most {} of the never-released score",
    "absolute": "the score lost to releasing is at most {} of the full score",
    "signed": "the mean score falls by at most {} of the full score",
}


@dataclass(frozen=True)
class Tested:
    """The Learn-then-Test side of a tuned task.

    `p_value` is that of the last of the `passed` thresholds or, where none passed, of the strictest, whose loss is then
    `strictest_loss`. `needed` and `certifiable` say why nothing passed: about how many requests it takes (None: no
    number would do), and the smallest max-drop that this many could certify (None: not even the largest).
    """

    max_drop: float
    thresholds: int
    p_value: float
    passed: int = 0
    strictest_loss: float | None = None
    needed: int | None = None
    certifiable: float | None = None


@dataclass(frozen=True)
class TunedTask:
    """The operating point of one task and what it gives on the calibration requests; `by` says how it was chosen.

    `loss` is what max-drop limits, as seen at the threshold, and `bound` its upper confidence bound at `confidence` for
    this threshold alone (losses.upper_bound); both are 0 for never. None: undefined, or above every bound tested.
    """

    by: str
    threshold: float | None
    kind: Kind
    confidence: float
    loss: float | None
    bound: float | None
    overall: Summary
    solved: Summary | None
    left_out: LeftOut
    noise: str
    tested: Tested | None = None


@dataclass(frozen=True)
class TuneReport:
    """All tuned tasks; `artifact` now holds their thresholds."""

    artifact: Path
    tasks: dict[str, TunedTask]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The JSON of design.md; what is unknown is left out."""
        return {"tasks": {name: _json(task) for name, task in self.tasks.items()}}

    def render(self) -> str:
        """The report as text, one block per task."""
        blocks = [_text(name, task) for name, task in self.tasks.items()]
        notes = [f"note: {note}" for note in self.notes]
        return "\n\n".join([*blocks, "\n".join([*notes, f"Thresholds written to {self.artifact}"])])


def task_numbers(overall: Summary) -> dict[str, Any]:
    """The measured part of a task's JSON."""
    return {
        "n": overall.n,
        "q_base": overall.q_base,
        "q_adapter": overall.q_adapter,
        "q_policy": overall.q_policy,
        "drop": overall.drop,
        "active_row_share": overall.active_row_share,
        "length_ratio": overall.length_ratio,
    }


def without_unknown(values: Mapping[str, Any], keep: tuple[str, ...] = ("threshold",)) -> dict[str, Any]:
    """Without the None values, except of the keys in `keep` (a threshold of null means never)."""
    return {k: v for k, v in values.items() if v is not None or k in keep}


def write_json(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write `content` atomically; InputError when the path cannot be written."""
    try:
        atomic_write_text(Path(path), json.dumps(content, indent=2, allow_nan=False) + "\n")
    except OSError as error:
        raise InputError(f"--json {path}: cannot be written ({error.strerror})") from None


def table(overall: Summary, solved: Summary | None) -> list[str]:
    """The measured numbers, over all requests and over those that the adapter solves (S > 0), by which we judge."""
    head = f"{'':12}{'n':>7}{'Q_base':>8}{'Q_adapter':>11}{'Q_policy':>10}{'drop':>8}{'retention':>11}{'released':>10}"
    lines = [f"{head}{'active rows':>13}{'length':>8}"]
    for name, s in (("all", overall), ("S > 0", solved)):
        if s is not None:
            drop, retention = (percent(v) for v in (s.drop, s.retention))
            lines.append(
                f"{name:12}{s.n:>7,}{s.q_base:>8.3f}{s.q_adapter:>11.3f}{s.q_policy:>10.3f}{drop:>8}{retention:>11}"
                f"{s.released:>10.1%}{s.active_row_share:>13.1%}{s.length_ratio:>8.3f}"
            )
    return lines


def _json(task: TunedTask) -> dict[str, Any]:
    promise = {"confidence": task.confidence, "bound": task.bound}
    if task.tested:
        promise = {"max_drop": task.tested.max_drop, **promise}
    return without_unknown({"threshold": task.threshold, **promise, **task_numbers(task.overall)})


def _text(name: str, task: TunedTask) -> str:
    head = "never release" if task.threshold is None else f"threshold {task.threshold:.4g}"
    lines = [f"Task {name}: {head} ({task.by})", *_promise(task), f"noise: {task.noise}"]
    if task.left_out.differs or task.left_out.missing:
        lines.append(f"rollouts left out: {task.left_out.differs} differ by numerics, {task.left_out.missing} missing")
    return "\n  ".join([*lines, *table(task.overall, task.solved)])


def _promise(task: TunedTask) -> list[str]:
    t, sure = task.tested, f"{task.confidence:.0%} confidence"
    seen = (
        f"{task.kind} loss here {percent(task.loss)}, at most {percent(task.bound)} with {sure} at this threshold alone"
    )
    if t is None:
        return ["no guarantee: the threshold was given, not tested", seen]
    if task.threshold is not None:
        promise = PROMISE[task.kind].format(f"{t.max_drop:.2%}")
        return [f"guarantee: with {sure}, {promise}", f"{seen} (p = {t.p_value:.3g} for the guarantee)"]
    return _never(t, task, sure)


def _never(t: Tested, task: TunedTask, sure: str) -> list[str]:
    """Why no threshold was kept."""
    asked, n = f"at max-drop {t.max_drop:.2%} ({task.kind}) with {sure}", f"{task.overall.n:,} requests"
    if t.passed:
        return [
            f"{t.passed} of {t.thresholds} thresholds passed {asked}",
            "but they hardly ever release, and no request that they release keeps a score above 0",
        ]
    needed = "no number of such requests would do"
    if t.needed is not None:
        needed = f"about {t.needed:,} such requests are needed"
    return [
        f"none of {t.thresholds} thresholds passed {asked}",
        f"the strictest loses {percent(t.strictest_loss)} on these {n} (p = {t.p_value:.3g}): {needed}",
        f"the smallest max-drop that {n} could certify, none of them harmed, is {percent(t.certifiable)}",
    ]


def percent(value: float | None) -> str:
    """`value` in percent with two digits; "-" where it means nothing."""
    return "-" if value is None else f"{value:.2%}"
