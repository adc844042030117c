"""Draws benchmarks/data/study_bands.csv: score kept over active-row share, ordinary and release-aware adapters.

    python benchmarks/plot_study.py benchmarks/data/study_bands.csv docs/study.png

A line for each task and backbone: the learned policy at every threshold of its grid, on test requests with S > 0; bands
are the 5 % and 95 % quantile of 400 resamples of the requests.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import pandas as pd

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

KINDS = {"ordinary": "ordinary adapters", "release-aware": "release-aware adapters"}
COLOURS = {"e2e": "#0072b2", "gsm8k": "#e69f00", "scan": "#009e73", "snips_json": "#d55e00", "wikisql": "#cc79a7"}
STYLES = {"SmolLM2-135M-Instruct": "-", "Qwen2.5-Coder-0.5B-Instruct": "--"}


def panel(axis: Axes, rows: pd.DataFrame, title: str) -> None:
    """The lines of one kind of adapter."""
    for (task, backbone), line in rows.sort_values("share").groupby(["task", "backbone"]):
        colour, style = COLOURS[task], STYLES[backbone]
        axis.fill_between(line["share"], line["kept_low"], line["kept_high"], color=colour, alpha=0.12, linewidth=0)
        label = f"{task}, {backbone.partition('-')[0]}"
        axis.plot(line["share"], line["kept"], color=colour, linestyle=style, label=label, linewidth=1.8)
    axis.set(title=title, xlabel="active-row share", xlim=(0, 1), ylim=(0, 1.03))
    axis.grid(alpha=0.3)


def main() -> None:
    """Read the rows, write the figure."""
    source, target = map(Path, sys.argv[1:])
    rows = pd.read_csv(source)
    rows = rows[rows["policy"] == "LightGBM"]
    figure, axes = pyplot.subplots(1, len(KINDS), figsize=(9, 3.6), sharey=True, layout="constrained")
    for axis, (kind, title) in zip(axes, KINDS.items(), strict=True):
        panel(axis, rows[rows["adapter"] == kind], title)
    axes[0].set_ylabel("score kept (R / S)")
    lines = {label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    axes[-1].legend(lines.values(), lines.keys(), loc="lower right")  # the lines leave it room
    figure.savefig(target, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()
