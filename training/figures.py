"""The figures of a training run: retention over active-row share, release steps, and the score's reliability."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lorazor.training.compare import Comparison
from lorazor.training.reliability import Reliability
from lorazor.training.replay import NEVER, Floats, Ints

STYLES: dict[str, dict[str, Any]] = {
    "LightGBM": {"linewidth": 2.5, "color": "black", "zorder": 5},
    "oracle": {"marker": "*", "linestyle": "none", "markersize": 12, "zorder": 6},
    # On one task the same curve as the fixed step's.
    "fixed fraction": {"linewidth": 1, "linestyle": "--"},
}


def draw_all(
    folder: Path,
    comparisons: Mapping[str, Comparison],
    releases: Mapping[str, tuple[Ints, Ints]],
    reliability: Mapping[str, Reliability],
) -> list[Path]:
    """Write every figure as PNG into `folder` and return the paths; `releases` is as `release_steps` takes it."""
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {
        "retention_over_share": retention_over_share(comparisons),
        "release_steps": release_steps(releases),
        "reliability": reliability_diagram(reliability),
    }
    paths = []
    for name, figure in drawn.items():
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=120)
    return paths


def retention_over_share(comparisons: Mapping[str, Comparison]) -> Any:
    """One panel per task: each policy's test curve (requests with S > 0); where retention is null, 1 - drop."""
    figure, axes = _panels(len(comparisons))
    for axis, (task, comparison) in zip(axes, comparisons.items(), strict=True):
        curves = comparison.curves
        null = any(np.isnan(curve.retention).any() for curve in curves.values())
        for name, curve in curves.items():
            height: Floats = 1 - curve.drop if null else curve.retention
            axis.plot(curve.share, height, label=name, **STYLES.get(name, {"linewidth": 1}))
        axis.scatter([1], [1], color="grey", marker="s", label="never")
        axis.set(title=task, xlabel="active-row share", ylabel="1 - drop" if null else "retention", xlim=(-0.02, 1.04))
        axis.set_ylim(min(0.0, axis.get_ylim()[0]), max(1.05, axis.get_ylim()[1]))
        axis.grid(alpha=0.3)
    axes[-1].legend(fontsize="x-small", loc="lower right")
    return figure


def release_steps(releases: Mapping[str, tuple[Ints, Ints]]) -> Any:
    """One panel per task: how many requests release at each step; takes (release step [n], decision [n]) by task."""
    figure, axes = _panels(len(releases))
    for axis, (task, (release, decision)) in zip(axes, releases.items(), strict=True):
        released = release[decision != NEVER]
        if len(released):
            axis.hist(released, bins=np.arange(0, released.max() + 2, max(1, released.max() // 40)), color="black")
        share = 1 - len(released) / max(1, len(release))
        axis.set(title=f"{task}: {share:.0%} never released", xlabel="release step", ylabel="requests")
    return figure


def reliability_diagram(reliability: Mapping[str, Reliability]) -> Any:
    """One panel per task: how often a release was safe, by the score that said so."""
    figure, axes = _panels(len(reliability))
    for axis, (task, measured) in zip(axes, reliability.items(), strict=True):
        axis.plot([0, 1], [0, 1], color="grey", linewidth=1, linestyle="--")
        axis.plot(measured.predicted, measured.observed, color="black", marker="o")
        axis.set(title=f"{task}: Brier {measured.brier:.3f}", xlabel="score", ylabel="share of safe releases")
        axis.grid(alpha=0.3)
    return figure


def _panels(n: int) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * max(n, 1), 4), layout="constrained")
    axes = figure.subplots(1, max(n, 1), squeeze=False)
    return figure, list(axes[0])[: max(n, 1)] if n else []
