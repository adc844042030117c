"""Draws benchmarks/data/kernels.csv: time over the share of active rows; stock vLLM, ours, and what the bytes need.

python benchmarks/plot_kernels.py benchmarks/data/kernels.csv docs/kernels.png
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

STYLES = {"stock": ("stock vLLM", "tab:grey", "o-"), "ours": ("LoRazor", "tab:orange", "o-")}
LIMIT = ("bytes at 4.3 TB/s", "tab:blue", "--")
COLUMNS = 4


def read(path: Path) -> dict[tuple[int, int, int], list[dict[str, str]]]:
    """Measured rows by (adapters, rank, rows); the builders of the tile list have no share and are left out."""
    points: dict[tuple[int, int, int], list[dict[str, str]]] = defaultdict(list)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["share"] and row["ms"] and row["path"] in STYLES:
                points[int(row["adapters"]), int(row["rank"]), int(row["rows"])].append(row)
    return dict(sorted(points.items(), key=lambda item: (item[0][2], item[0])))


def main() -> None:
    """Read the table named first, write the picture named second."""
    source, target = map(Path, sys.argv[1:3])
    points = read(source)
    figure, axes = pyplot.subplots(
        -(-len(points) // COLUMNS), COLUMNS, figsize=(13, 6.5), squeeze=False, layout="constrained"
    )
    for axis, ((adapters, rank, rows), table) in zip(axes.flat, points.items(), strict=False):
        for path, (label, colour, line) in STYLES.items():
            series = sorted((100 * float(r["share"]), float(r["ms"])) for r in table if r["path"] == path)
            axis.plot(*zip(*series, strict=True), line, color=colour, label=label)
        limit = sorted((100 * float(r["share"]), float(r["least_ms"])) for r in table if r["path"] == "ours")
        axis.plot(*zip(*limit, strict=True), LIMIT[2], color=LIMIT[1], label=LIMIT[0])
        axis.set(title=f"{adapters} adapters, r{rank}, {rows} row{'s' if rows > 1 else ''}", ylim=(0, None))
        axis.grid(alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel("active rows, %")
    for axis in axes[:, 0]:
        axis.set_ylabel("ms, 32 layers")
    axes[0, 0].legend(fontsize="small")
    figure.savefig(target, dpi=90)


if __name__ == "__main__":
    main()
