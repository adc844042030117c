"""Whether a score of 0.9 means safe nine times in ten: Brier score and calibration curve on the test decisions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lorazor.training.replay import Bools, Floats

BINS = 10


@dataclass(frozen=True, eq=False)
class Reliability:
    """`predicted` and `observed` are the mean score and the share of safe labels in each of up to ten equal bins."""

    brier: float
    predicted: Floats
    observed: Floats
    n: int


def reliability(labels: Bools, scores: Floats) -> Reliability:
    """Measure scores in [0, 1] ([D] float64) against labels ([D] bool); NaN and empty curves without decisions."""
    from sklearn.calibration import calibration_curve
    from sklearn.metrics import brier_score_loss

    if not len(labels):
        return Reliability(float("nan"), np.empty(0), np.empty(0), 0)
    observed, predicted = calibration_curve(labels, scores, n_bins=BINS, strategy="quantile", pos_label=True)
    return Reliability(float(brier_score_loss(labels, scores, pos_label=True)), predicted, observed, len(labels))
