"""Fixed-sequence testing: against MAPIE's, and the rules that matter at its edges."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorazor.training.ltt import Kept, fixed_sequence, keep
from lorazor.training.pvalues import Floats


@pytest.mark.parametrize(
    ("p_values", "kept"),
    [
        ([0.01, 0.02, 0.09], 2),
        ([0.01, 0.2, 0.01], 0),
        ([0.2, 0.01, 0.01], None),
        ([0.1, 0.5], 0),
        ([float("nan"), 0.01], None),
        ([], None),
    ],
)
def test_the_first_failure_ends_the_tests(p_values: list[float], kept: int | None) -> None:
    """The last threshold before the first p above the level is kept, whatever follows; none means never."""
    assert fixed_sequence(np.array(p_values), 0.1) == kept


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50), st.sampled_from([0.05, 0.1, 0.5]))
def test_agrees_with_mapie(p_values: list[float], level: float) -> None:
    """MAPIE's fixed sequence rejects exactly the thresholds up to the one kept."""
    from mapie.risk_control import control_fwer

    kept = fixed_sequence(np.array(p_values), level)
    rejected = control_fwer(np.array(p_values), level, "fixed_sequence")
    assert list(rejected) == list(range(0 if kept is None else kept + 1))


def at_any_level(p_values: Floats) -> Callable[[slice, float], Floats]:
    """p-values [sets, thresholds] that do not depend on the level at which they are used."""
    return lambda some, _: p_values[:, some]


def test_two_starts_by_hand() -> None:
    """The loosest is tested first, with its part of the level; where it fails the walk has the rest."""
    sets = np.array([[0.5, 0.5, 0.025], [0.07, 0.5, 0.03], [0.08, 0.01, 0.03], [0.01, 0.07, 0.026]])
    found = keep(at_any_level(sets), 3, 0.1, 0.25)
    assert found == [Kept(2, 0.025), Kept(0, 0.07), Kept(None, 0.08), Kept(2, 0.026)]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.sampled_from([0.05, 0.1, 0.5]))
def test_one_start_is_the_fixed_sequence(p_values: list[float], level: float) -> None:
    """Without a part for the loosest threshold nothing else is done."""
    (kept,) = keep(at_any_level(np.array([p_values])), len(p_values), level, 0.0)
    assert kept.index == fixed_sequence(np.array(p_values), level)
    assert kept.p_value == p_values[kept.index or 0]


def test_two_starts_spend_the_level_once() -> None:
    """Where every threshold is bad, uniform p-values keep one in at most the level of 20,000 sets, and nearly so."""
    rng = np.random.default_rng(0)
    kept = keep(at_any_level(rng.random((20_000, 6))), 6, 0.1, 0.25)
    share = np.mean([one.index is not None for one in kept])
    assert 0.09 < share <= 0.1 + 3 * np.sqrt(0.1 * 0.9 / 20_000)
