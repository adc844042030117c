"""Draws benchmarks/data/kernels.csv: time over the share of active rows; stock vLLM, ours, and what the bytes need.

    python benchmarks/plot_kernels.py benchmarks/data/kernels.csv docs/kernels.png

Lines are medians, bands p20 to p80. vLLM is drawn as it ships, and with the tile sizes that a short search found for
this GPU; with no active row it launches nothing.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

ROWS = 128
PANELS = [("8", "16"), ("32", "16"), ("16", "64"), ("64", "16")]  # adapters and rank, as the table has them
# Label, colour (told apart by colour-blind readers too) and line of each contestant.
LINES = {
    "stock": ("vLLM as it ships", "#d55e00", "s-"),
    "stock, tuned": ("vLLM, tuned here", "#e69f00", "^-"),
    "ours": ("LoRazor", "#0072b2", "o-"),
}
LIMIT = ("least bytes, at 4.3 TB/s", "#555555", "--")

Row = dict[str, str]


def read(path: Path) -> list[Row]:
    """The rows with a time and a share (the tile list's have none)."""
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["share"] and row["ms"]]


def by_share(rows: list[Row], path: str) -> dict[float, Row]:
    """The rows of one path."""
    return {
        float(row["share"]): row for row in sorted(rows, key=lambda row: float(row["share"])) if row["path"] == path
    }


def panel(axis: Axes, rows: list[Row]) -> None:
    """One configuration; shares stand at equal distances, since most happens among the small ones."""
    series = {path: by_share(rows, path) for path in LINES}
    places = {share: place for place, share in enumerate(sorted({float(row["share"]) for row in rows}))}
    for path, (label, colour, line) in LINES.items():
        found = series[path]
        at = [places[share] for share in found]
        low, middle, high = ([float(row[name]) for row in found.values()] for name in ("p20", "ms", "p80"))
        axis.fill_between(at, low, high, color=colour, alpha=0.25, linewidth=0)
        axis.plot(at, middle, line, color=colour, label=label, linewidth=1.8, markersize=5)
    limit = {places[share]: float(row["least_ms"]) for share, row in series["ours"].items() if share}
    axis.plot(list(limit), list(limit.values()), LIMIT[2], color=LIMIT[1], label=LIMIT[0], linewidth=1.5)
    axis.set_xticks(list(places.values()), [f"{100 * share:g}" for share in places])
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.grid(alpha=0.3)


def main() -> None:
    """Read the table named first, write the picture named second."""
    source, target = map(Path, sys.argv[1:3])
    table = read(source)
    pyplot.rcParams["font.size"] = 11
    figure, axes = pyplot.subplots(2, 2, figsize=(9, 6.4), sharex=True, sharey=True, layout="constrained")
    for axis, (adapters, rank) in zip(axes.flat, PANELS, strict=True):
        where = (adapters, rank, str(ROWS))
        rows = [row for row in table if (row["adapters"], row["rank"], row["rows"]) == where]
        axis.set_title(f"{adapters} adapters of rank {rank}, {ROWS} rows")
        if rows:
            panel(axis, rows)
    figure.supxlabel("active rows, %")
    figure.supylabel("milliseconds, 32 layers")
    handles, labels = next((axis for axis in axes.flat if axis.lines), axes.flat[0]).get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False)
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main()
