"""The figures of the demo's report, as SVG to be put into its page: the policy on requests that it never saw.

`lorazor train --figures` draws all baselines; here are fewer, with the threshold that `tune` chose marked.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from lorazor.policy.artifact import load_artifact
from lorazor.training.baselines import ORACLE, simple_policies
from lorazor.training.calibration import Scored, calibration
from lorazor.training.compare import candidates
from lorazor.training.labels import safe
from lorazor.training.reliability import reliability
from lorazor.training.replay import summarize, sweep

ADAPTER, BASE, INK, GRID = "#c2560c", "#0e7490", "#334155", "#e2e8f0"
BASELINES = {"fixed step": "#7c3aed", "entropy": "#64748b", "KL": "#0891b2", "random": "#cbd5e1"}
STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10.5,
    "axes.edgecolor": "#94a3b8",
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 11.5,
    "axes.titlecolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}

Panel = Callable[[Axes, Scored, float | None], None]


def draw(policy: Path, traces: Path) -> dict[str, str]:
    """The three figures by name, each an `<svg>` element, over the requests of `traces` that training did not see."""
    data = calibration(policy, traces, unseen_only=True)
    thresholds = {task: part.threshold for task, part in load_artifact(policy).manifest.tasks.items()}
    panels: dict[str, Panel] = {"retention": _retention, "steps": _release_steps, "reliability": _reliability}
    return {name: _svg(panel, data.tasks, thresholds) for name, panel in panels.items()}


def _svg(panel: Panel, tasks: Mapping[str, Scored], thresholds: Mapping[str, float | None]) -> str:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10.4, 3.7), layout=ConstrainedLayoutEngine(wspace=0.08))
        axes = figure.subplots(1, len(tasks), squeeze=False)[0]
        for axis, (task, scored) in zip(axes, tasks.items(), strict=True):
            axis.set_title(task, loc="left", fontweight="bold")
            axis.grid(color=GRID, linewidth=0.8)
            axis.set_axisbelow(True)
            panel(axis, scored, thresholds[task])
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True)
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def _retention(axis: Axes, scored: Scored, threshold: float | None) -> None:
    table = scored.table
    scores = {p.name: p.score(table) for p in simple_policies(0, {table.task: float(table.length.mean())})}
    curves = [(name, scores[name], colour, 1.6) for name, colour in BASELINES.items()]
    curves.append(("learned policy", scored.scores, ADAPTER, 2.8))
    for name, score, colour, width in curves:
        curve = sweep(table, score, candidates({table.task: table}, {table.task: score}), solved_only=True)
        # Every policy may also never release.
        share, kept = np.append(curve.share, 1.0), np.append(1 - curve.drop, 1.0)
        axis.plot(100 * share, 100 * kept, label=name, color=colour, linewidth=width)
    _point(axis, scored, ORACLE.score(table), 1.0, label="oracle", marker="*", s=130, color="#ca8a04")
    if threshold is not None:
        _point(axis, scored, scored.scores, threshold, label="as tuned", s=75, color="white", edgecolor=ADAPTER)
    axis.set(xlim=(-2, 102), ylim=(-3, 105), xlabel="active-row share, %", ylabel="score kept, %")
    axis.legend(fontsize=9, frameon=False, loc="lower right")


def _point(axis: Axes, scored: Scored, scores: Any, threshold: float, **style: Any) -> None:
    table = scored.table
    outcome = table.outcome(table.first_decision(scores, threshold))
    found = summarize(table, outcome, solved_only=True)
    style = {"zorder": 5, "linewidth": 2, "clip_on": False, **style}
    axis.scatter([100 * found.active_row_share], [100 - 100 * (found.drop or 0.0)], **style)


def _release_steps(axis: Axes, scored: Scored, threshold: float | None) -> None:
    table = scored.table
    outcome = table.outcome(table.first_decision(scored.scores, threshold))
    steps, counts = np.unique(outcome.release[outcome.released], return_counts=True)
    names: Sequence[str] = [*map(str, steps), "never"]
    heights = [*counts, int((~outcome.released).sum())]
    bars = axis.bar(names, heights, width=0.72, color=[BASE] * len(steps) + [ADAPTER])
    axis.bar_label(bars, fontsize=9, padding=2)
    axis.grid(visible=False, axis="x")
    axis.margins(y=0.12)
    axis.set(xlim=(-0.9, max(len(names), 6) - 0.1), xlabel="release step (output tokens made with the adapter)")
    axis.set_ylabel(f"of {len(table)} requests")


def _reliability(axis: Axes, scored: Scored, threshold: float | None) -> None:
    measured = reliability(safe(scored.table), scored.scores)
    axis.plot([0, 1], [0, 1], color="#94a3b8", linewidth=1.2, linestyle="--", label="a perfect score")
    axis.plot(measured.predicted, measured.observed, color=ADAPTER, marker="o", linewidth=2, label="learned policy")
    if threshold is not None:
        axis.axvline(threshold, color=BASE, linewidth=1.4, label="threshold")
    axis.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.05), xlabel="score", ylabel="share of releases that were safe")
    axis.legend(fontsize=9, frameon=False, loc="best", title=f"Brier score {measured.brier:.3f}")
