"""The figures of a study, drawn from rows of its CSV files alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from lorazor.training.figures import STYLES
from lorazor.training.learned import LEARNED
from lorazor.training.study.layout import KINDS

SHOWN = ("fixed step", "entropy", "KL", LEARNED, "oracle")
COLOURS = {"ordinary": "#64748b", "prompt-only": "#c2560c", "release-aware": "#0e7490"}


def draw(folder: Path, tables: Mapping[str, pd.DataFrame]) -> list[Path]:
    """Write the PNGs of every table that is there; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn: list[tuple[str, str, Callable[[pd.DataFrame], dict[str, Any]]]] = [
        ("bands", "bands", partial(over_share, value="kept", label="score kept")),
        ("retention", "bands", partial(over_share, value="retention", label="retention")),
        ("since", "since", retention_since),
        ("curves", "curves", validation_curves),
        ("importance", "importance", feature_importance),
    ]
    paths = []
    for name, table, function in drawn:
        for key, figure in (function(tables[table]) if table in tables else {}).items():
            paths.append(folder / f"{name}-{key}.png")
            figure.savefig(paths[-1], dpi=120, metadata={"Software": None})
    return paths


def over_share(rows: pd.DataFrame, *, value: str, label: str) -> dict[str, Any]:
    """Per cell, each policy's `value` (kept, which is R over S, or retention), and the 90 % band of the learnt one."""

    def panel(axis: Any, cell: pd.DataFrame) -> None:
        for name in SHOWN:
            line = cell[cell["policy"] == name].sort_values("share")
            axis.plot(line["share"], line[value], label=name, **STYLES.get(name, {"linewidth": 1}))
            if name == LEARNED:
                axis.fill_between(line["share"], line[f"{value}_low"], line[f"{value}_high"], color="black", alpha=0.15)
        axis.set(xlabel="active-row share", ylabel=label, xlim=(-0.02, 1.04))

    return _by_cell(rows, value, panel)


def retention_since(rows: pd.DataFrame) -> dict[str, Any]:
    """Per cell: retention of the released requests, with its 90 % band, over the tokens since the release."""

    def panel(axis: Any, cell: pd.DataFrame) -> None:
        for (kind, max_drop), line in cell.groupby(["loss_kind", "max_drop"]):
            middle, kept = (line["tokens_from"] + line["tokens_to"]) / 2, line["retention"]
            # A quantile of few requests may pass its own mean.
            error = [(kept - line["retention_low"]).clip(lower=0), (line["retention_high"] - kept).clip(lower=0)]
            axis.errorbar(middle, kept, error, marker="o", capsize=3, label=f"{kind} {max_drop:.0%}")
        axis.set(xlabel="tokens since the release", ylabel="retention")

    return _by_cell(rows, "retention", panel)


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


def _by_cell(rows: pd.DataFrame, value: str, panel: Callable[[Any, pd.DataFrame], None]) -> dict[str, Any]:
    """Per backbone a figure with a row per task and a column per adapter; none where no cell has a `value`.

    Retention is null where an adapter gains nothing over the base.
    """
    figures = {}
    for backbone, part in rows.dropna(subset=value).groupby("backbone") if value in rows else ():
        figures[str(backbone)], axes = _grid(part)
        for axis in axes.values():
            axis.set_visible(False)  # an adapter that was not collected
        for (task, adapter), cell in part.groupby(["task", "adapter"]):
            axis = axes[str(task), str(adapter)]
            axis.set_visible(True)
            panel(axis, cell)
            axis.set_title(f"{task}, {adapter}")
        axis.legend(fontsize="x-small")
    return figures


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
