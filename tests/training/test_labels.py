"""What each decision counts in learning follows from what it saves, whatever its label."""

from dataclasses import replace

import numpy as np
import pytest

from lorazor.training.labels import LEAST, UNSOLVED, weight
from lorazor.training.replay import ReplayTable
from tests.planted import planted_traces


@pytest.fixture(scope="module")
def table() -> ReplayTable:
    """Requests with S > 0 and with S = 0."""
    return ReplayTable.from_traces(planted_traces(200, seed=1), "sql", 40.0)


def test_a_decision_counts_the_share_of_steps_that_it_saves(table: ReplayTable) -> None:
    """From all of them, for a release after the prompt, to next to none; a request with S = 0 counts less."""
    length, solved = table.length[table.request], table.solved[table.request]
    saved = (length - table.release) / (length - 1)
    assert solved.any()
    assert not solved.all()
    assert saved.max() == 1
    np.testing.assert_allclose(weight(table)[solved], saved[solved] + LEAST)
    np.testing.assert_allclose(weight(table)[~solved], UNSOLVED * (saved[~solved] + LEAST))
    assert weight(table).min() > 0


def test_the_label_does_not_change_it(table: ReplayTable) -> None:
    """Other outcomes of the releases leave every weight as it is."""
    other = replace(table, released_score=1 - table.released_score, same_text=~table.same_text)
    np.testing.assert_array_equal(weight(other), weight(table))
