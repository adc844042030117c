"""The threshold grid that `tune` walks: fixed at training, before any calibration data are read."""

from __future__ import annotations

import numpy as np

from lorazor.training.compare import candidates
from lorazor.training.dataset import Tables
from lorazor.training.replay import Floats, sweep

GRID_SIZE = 50


def threshold_grid(tables: Tables, scores: dict[str, Floats], size: int = GRID_SIZE) -> list[float]:
    """At most `size` quantiles of the scores of some requests of a training, strictest (highest) first.

    Among the quantiles those are taken whose active-row shares on these requests lie evenly between 1 and the
    least: evenly spaced quantiles would spend most of the grid where one share follows from many thresholds.
    Tasks share the grid, and each gets its part of it.
    """
    each = max(2, size // max(1, len(tables)))
    picked: list[float] = []
    for task, table in tables.items():
        levels = candidates({task: table}, {task: scores[task]})
        if not len(levels):  # no decision, or none with a score
            continue
        share = sweep(table, scores[task], levels).share
        wanted = np.linspace(share.min(), share.max(), each)
        nearest = np.abs(share[:, None] - wanted).argmin(axis=0)
        picked.extend(levels[nearest].tolist())
    grid = sorted(set(picked), reverse=True)
    if len(grid) > size:
        grid = [grid[i] for i in np.linspace(0, len(grid) - 1, size).round().astype(int)]
    return grid
