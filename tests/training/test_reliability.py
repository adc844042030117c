"""Brier score and calibration curve against their definitions."""

import numpy as np
import pytest

from lorazor.training.reliability import reliability


def test_brier_and_curve_by_definition() -> None:
    """A calibrated score lies on the diagonal, and its Brier score is the mean squared error."""
    rng = np.random.default_rng(0)
    scores = rng.random(20_000)
    labels = rng.random(20_000) < scores
    measured = reliability(labels, scores)
    assert measured.brier == pytest.approx(np.mean((scores - labels) ** 2))
    assert measured.observed == pytest.approx(measured.predicted, abs=0.04)
    assert len(measured.predicted) == 10
    assert measured.n == 20_000


def test_one_class_and_nothing_are_defined() -> None:
    """A task that is never safe has a curve at 0; no decisions give NaN and an empty curve."""
    never = reliability(np.zeros(50, np.bool_), np.linspace(0, 0.1, 50))
    assert (never.observed == 0).all()
    nothing = reliability(np.zeros(0, np.bool_), np.zeros(0))
    assert np.isnan(nothing.brier)
    assert nothing.n == len(nothing.predicted) == 0
