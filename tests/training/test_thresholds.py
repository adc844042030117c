"""The threshold grid that tune walks."""

import numpy as np

from lorazor.training.replay import ReplayTable, sweep
from lorazor.training.thresholds import threshold_grid
from tests.planted import planted_traces


def test_threshold_grid_is_short_strictest_first_and_even_in_share() -> None:
    """At most 50 scores that occurred, descending, whose shares leave no gap above 0.05 where the scores allow it."""
    table = ReplayTable.from_traces(planted_traces(300, seed=1), "sql", 40.0)
    scores = np.random.default_rng(1).beta(0.2, 0.2, len(table.step))
    grid = threshold_grid(table, scores)
    assert 20 < len(grid) <= 50
    assert grid == sorted(grid, reverse=True)
    assert set(grid) <= set(scores.tolist())
    share = sweep(table, scores, grid).share
    assert np.abs(np.diff(share)).max() < 0.05


def test_without_a_score_there_is_no_threshold() -> None:
    """A baseline that has no signal at any decision releases nothing, so it has nothing to test."""
    table = ReplayTable.from_traces(planted_traces(20, seed=1), "sql", 40.0)
    assert threshold_grid(table, np.full(len(table.step), np.nan)) == []
