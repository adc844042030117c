"""The arithmetic of decision and release steps, against the words of the design."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorazor.features.grid import (
    boundary,
    decision_steps,
    is_decision_step,
    is_decision_step_of_each,
    release_grid,
    release_step,
)


def test_release_grid_is_the_designs() -> None:
    """The grid is 1, 3, g + 2, 2g + 2, … below the length."""
    assert release_grid(30, 8) == [1, 3, 10, 18, 26]
    assert decision_steps(30, 8) == [0, 1, 8, 16, 24]


@pytest.mark.parametrize(
    ("length", "grid"), [(0, []), (1, []), (2, [1]), (3, [1]), (4, [1, 3]), (10, [1, 3]), (11, [1, 3, 10])]
)
def test_release_below_length(length: int, grid: list[int]) -> None:
    """A release step is on the grid only if at least one token is left to save."""
    assert release_grid(length, 8) == grid


def test_probe_interval_one_decides_at_every_step() -> None:
    """With g = 1 the decision step c = 1 is not counted twice."""
    assert decision_steps(6, 1) == [0, 1, 2, 3]


@given(st.integers(0, 300), st.integers(1, 64))
def test_decision_steps_ascend_and_are_decision_steps(length: int, interval: int) -> None:
    """Every step after admission is one at which the server probes, and they come in order."""
    steps = decision_steps(length, interval)
    assert steps == sorted(set(steps))
    assert all(is_decision_step(c, interval) for c in steps[1:])
    assert all(release_step(c) < length for c in steps)
    assert [release_step(c) for c in steps] == release_grid(length, interval)


@given(st.lists(st.integers(-5, 200)), st.integers(1, 64))
def test_decision_steps_of_an_array(steps: list[int], interval: int) -> None:
    """The array's answer is that of each step."""
    found = is_decision_step_of_each(np.array(steps, np.int64), interval)
    assert found.tolist() == [is_decision_step(c, interval) for c in steps]


def test_boundary() -> None:
    """With r = 1 exactly the prompt runs with the adapter, and each further token moves the boundary by one."""
    assert boundary(prompt_tokens=10, release=1) == 10
    assert boundary(prompt_tokens=10, release=5) == 14
