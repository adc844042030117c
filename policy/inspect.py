"""A policy in words and pictures: what it is, what it promises, what it looks at, and its score over one request."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from pydantic import JsonValue

from lorazor.features.grid import release_step
from lorazor.policy.artifact import Artifact
from lorazor.policy.manifest import Guarantee, TaskPolicy

_BLOCKS = " ▁▂▃▄▅▆▇█"
_HEIGHT = 8


def describe(artifact: Artifact, top: int = 10) -> str:
    """Some lines of text about an artifact, with the `top` most important features."""
    manifest = artifact.manifest
    probing = "" if manifest.probes else ", for decisions: it never probes"
    lines = [
        f"Policy artifact  {artifact.path}",
        f"  base           {manifest.base_fingerprint[:16]}…",
        f"  probe interval {manifest.probe_interval} tokens{probing}",
        f"  features       {len(manifest.features)} (schema {manifest.schema_hash[:16]}…)",
        f"  model          {artifact.scorer.trees} trees, trained on {len(manifest.trained_on):,} requests",
        *(f"  {name:<14} {_short(value)}" for name, value in sorted(manifest.made.items())),
        "",
        "Adapters",
        *(f"  {a.name}  ({a.fingerprint[:16]}…)  task {a.task or 'none'}" for a in manifest.adapters),
        "",
        "Tasks",
    ]
    for name, task in sorted(manifest.tasks.items()):
        lines += [f"  {name}: {_operating_point(task)}", *(f"    {line}" for line in _promise(task.guarantee))]
    lines += ["", "Most important features (share of the gain)"]
    for name, share in list(artifact.scorer.importance().items())[:top]:
        lines.append(f"  {name:<22} {share:6.1%} {_bar(share)}")
    return "\n".join(lines)


def draw_score(
    steps: Sequence[int] | npt.NDArray[np.int64],
    scores: Sequence[float] | npt.NDArray[np.float64],
    threshold: float | None,
    width: int = 72,
) -> str:
    """The score at each decision step of one request as a text chart, and where it would release.

    Args:
        steps: [D] ascending decision steps c, 0 = admission.
        scores: [D] in [0, 1].
        threshold: of the request's task, or None for never.
        width: columns of the chart; where there are more decisions, a column shows the highest of its own.
    """
    heights = np.asarray(scores, dtype=np.float64)
    if heights.size == 0:
        return "no decision step: the output is too short to release"
    groups = np.array_split(np.arange(heights.size), min(width, heights.size))
    repeat = max(1, min(4, width // heights.size))
    columns = np.repeat([heights[g].max() for g in groups], repeat)
    level = None if threshold is None else min(int(threshold * _HEIGHT), _HEIGHT - 1)
    rows = [_row(columns, row, row == level) for row in reversed(range(_HEIGHT))]
    first, last = str(steps[0]), str(steps[-1])
    axis = f"     └{'─' * columns.size}\n      {first}{last:>{max(columns.size - len(first), len(last) + 1)}}"
    return "\n".join([*rows, axis, _verdict(steps, heights, threshold)])


def _row(columns: npt.NDArray[np.float64], row: int, marked: bool) -> str:
    eighths = np.clip(np.floor((columns * _HEIGHT - row) * 8 + 0.5), 0, 8).astype(int)
    cells = "".join(_BLOCKS[n] if n or not marked else "┄" for n in eighths)
    label = {_HEIGHT - 1: "1.00", 0: "0.00"}.get(row, "")
    return f"{label:>4} {'┼' if marked else '│'}{cells}{' threshold' if marked else ''}"


def _verdict(steps: Sequence[int] | npt.NDArray[np.int64], scores: npt.NDArray[np.float64], t: float | None) -> str:
    if t is None:
        return "never released: the task has no threshold"
    reached = np.flatnonzero(scores >= t)
    if reached.size == 0:
        return f"never released: the highest score is {scores.max():.3f}, the threshold {t:.3f}"
    c = int(steps[reached[0]])
    where = "admission" if c == 0 else f"step {c}"
    return f"released at {where} (score {scores[reached[0]]:.3f} >= {t:.3f}): release step {release_step(c)}"


def _short(value: JsonValue) -> str:
    """How it was made, on one line each: a long list only by its length."""
    if isinstance(value, list):
        return f"{len(value):,} entries"
    if isinstance(value, dict):
        return ", ".join(f"{key} {entry}" for key, entry in value.items())
    return str(value)


def _operating_point(task: TaskPolicy) -> str:
    mean = f"mean output {task.mean_output_tokens:.0f} tokens"
    if task.threshold is None:
        return f"never releases ({mean})"
    how = "" if task.guarantee else ", no guarantee: set by hand or by a target share"
    return f"releases when the score reaches {task.threshold:.4f} ({mean}{how})"


def _promise(g: Guarantee | None) -> list[str]:
    if g is None:
        return []
    what = {
        "relative": f"the score lost to releasing is at most {g.max_drop:.2%} of the never-released score",
        "net": f"the mean score falls by at most {g.max_drop:.2%} of the never-released score",
        "absolute": f"the score lost to releasing is at most {g.max_drop:.4f} points",
        "signed": f"the never-released score is at most {g.max_drop:.4f} points above the released one",
    }[g.kind]
    numbers = {"mean loss": g.loss, "bound": g.bound, "active-row share": g.active_row_share, "length": g.length_ratio}
    shown = [f"{name} {value:.4f}" for name, value in numbers.items() if value is not None]
    return [f"with {g.confidence:.0%} confidence, {what}, on average", f"from {g.n:,} calibration requests", *shown]


def _bar(share: float) -> str:
    return "█" * round(share * 40)
