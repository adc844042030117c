"""The threshold grid that tune walks."""

import numpy as np

from lorazor.training.replay import ReplayTable, sweep
from lorazor.training.thresholds import threshold_grid
from tests.planted import planted_traces


def test_threshold_grid_is_short_strictest_first_and_even_in_share() -> None:
    """At most 50 scores that occurred, descending, whose shares leave no gap above 0.05 where the scores allow it."""
    table = ReplayTable.from_traces(planted_traces(300, seed=1), "sql", 40.0)
    tables = {"sql": table}
    scores = {"sql": np.random.default_rng(1).beta(0.2, 0.2, len(table.step))}
    grid = threshold_grid(tables, scores)
    assert 20 < len(grid) <= 50
    assert grid == sorted(grid, reverse=True)
    assert set(grid) <= set(scores["sql"].tolist())
    share = sweep(table, scores["sql"], grid).share
    assert np.abs(np.diff(share)).max() < 0.05
    many = threshold_grid({f"t{i}": table for i in range(40)}, {f"t{i}": scores["sql"] for i in range(40)})
    assert len(many) <= 50
