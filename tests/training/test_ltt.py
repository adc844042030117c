"""Fixed-sequence testing: against MAPIE's, and the rules that matter at its edges."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorazor.training.ltt import fixed_sequence


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
