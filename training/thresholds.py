"""The threshold grid that `tune` walks: fixed at training, before any calibration data are read."""

from __future__ import annotations

import numpy as np

from lorazor.policy.manifest import MAX_THRESHOLDS
from lorazor.training.compare import candidates
from lorazor.training.replay import Floats, ReplayTable, sweep


def threshold_grid(table: ReplayTable, scores: Floats) -> list[float]:
    """At most MAX_THRESHOLDS quantiles of a task's scores [D] on requests of a training, the strictest (highest) first.

    Among the quantiles those are taken whose active-row shares on these requests lie evenly between 1 and the
    least: evenly spaced quantiles would spend most of the grid where one share follows from many thresholds.
    """
    levels = candidates({table.task: table}, {table.task: scores})
    if not len(levels):  # no decision, or none with a score
        return []
    share = sweep(table, scores, levels).share
    wanted = np.linspace(share.min(), share.max(), MAX_THRESHOLDS)
    nearest = np.abs(share[:, None] - wanted).argmin(axis=0)
    return sorted(set(levels[nearest].tolist()), reverse=True)
