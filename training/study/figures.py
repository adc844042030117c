"""The figures of a study, drawn from rows of its CSV files alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from lorazor.training.figures import STYLES
from lorazor.training.study.layout import KINDS

SHOWN = ("fixed step", "entropy", "KL", "LightGBM", "oracle")
COLOURS = {"ordinary": "#64748b", "prompt-only": "#c2560c", "release-aware": "#0e7490"}


def draw(folder: Path, tables: Mapping[str, pd.DataFrame]) -> list[Path]:
    """Write a PNG for every table that is there; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn: dict[str, Callable[[pd.DataFrame], dict[str, Any]]] = {
        "bands": kept_over_share,
        "curves": validation_curves,
        "importance": feature_importance,
    }
    paths = []
    for name, function in drawn.items():
        for key, figure in (function(tables[name]) if name in tables else {}).items():
            paths.append(folder / f"{name}-{key}.png")
            figure.savefig(paths[-1], dpi=120, metadata={"Software": None})
    return paths


def kept_over_share(rows: pd.DataFrame) -> dict[str, Any]:
    """Per backbone: a panel for each task and adapter, each policy's kept score (R over S) with its 90 % band."""
    figures = {}
    for backbone, part in rows.groupby("backbone"):
        figures[str(backbone)], axes = _grid(part)
        for axis in axes.values():
            axis.set_visible(False)  # an adapter that was not collected
        for (task, adapter), cell in part.groupby(["task", "adapter"]):
            axis = axes[str(task), str(adapter)]
            axis.set_visible(True)
            for name in SHOWN:
                line = cell[cell["policy"] == name].sort_values("share")
                axis.plot(line["share"], line["kept"], label=name, **STYLES.get(name, {"linewidth": 1}))
                if name == "LightGBM":
                    axis.fill_between(line["share"], line["kept_low"], line["kept_high"], color="black", alpha=0.15)
            axis.set(title=f"{task}, {adapter}", xlabel="active-row share", ylabel="score kept", xlim=(-0.02, 1.04))
        next(iter(axes.values())).legend(fontsize="x-small")
    return figures


def validation_curves(rows: pd.DataFrame) -> dict[str, Any]:
    """Per backbone: a panel for each task, validation loss over steps, never released (solid) and prompt-only."""
    figures = {}
    for backbone, part in rows.groupby("backbone"):
        tasks = sorted(part["task"].unique())
        figures[str(backbone)], axes = _panels(1, len(tasks))
        for task, axis in zip(tasks, axes[0], strict=True):
            for adapter, metric in ((a, m) for a in KINDS for m in ("never", "prompt")):
                where = (part["task"] == task) & (part["adapter"] == adapter)
                line = part[where & (part["metric"] == f"eval_{metric}_loss")]
                style = {"color": COLOURS[adapter], "linestyle": "-" if metric == "never" else "--"}
                axis.plot(line["step"], line["value"], label=f"{adapter}, {metric}", **style)
            axis.set(title=task, xlabel="step", ylabel="validation loss", yscale="log")
        axes[0][0].legend(fontsize="x-small")
    return figures


def feature_importance(rows: pd.DataFrame, top: int = 15) -> dict[str, Any]:
    """The features with the largest mean share of the gain over all cells."""
    mean = rows.groupby("feature")["share_of_gain"].mean().nlargest(top).iloc[::-1]
    figure, axes = _panels(1, 1)
    axes[0][0].barh(list(mean.index), list(mean), color="black")
    axes[0][0].set(xlabel="share of the gain, mean over cells")
    return {"mean": figure}


def _grid(part: pd.DataFrame) -> tuple[Any, dict[tuple[str, str], Any]]:
    """A figure with a row per task and a column per adapter, and its axes by both."""
    tasks, kinds = sorted(part["task"].unique()), [k for k in KINDS if k in set(part["adapter"])]
    figure, axes = _panels(len(tasks), len(kinds))
    return figure, {(t, k): axes[i][j] for i, t in enumerate(tasks) for j, k in enumerate(kinds)}


def _panels(rows: int, columns: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * columns, 3.4 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    return figure, axes
