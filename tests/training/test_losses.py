"""Losses per kind: what they say, where they lie, and what can be certified with them."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats

from lorazor.training.losses import (
    Kind,
    certifiable,
    limit,
    observed,
    p_values,
    request_losses,
    requests_needed,
    upper_bound,
)
from lorazor.training.pvalues import Floats

KINDS: list[Kind] = ["relative", "net", "absolute", "signed"]
SCORE = st.floats(0, 1, width=32)  # as rollouts have it
SCORES = st.lists(st.tuples(SCORE, SCORE), min_size=1, max_size=30)


def harmed(n: int, quality: float, count: int) -> tuple[Floats, Floats]:
    """S [n] with a share `quality` of ones, and R in which `count` of those became 0."""
    never = (np.arange(n) < quality * n).astype(np.float64)
    released = never.copy()
    released[:count] = 0
    return never, released


@example([(0.0, 1.0)], 0.4811059612624808, "net")
@example([(0.0, 1.0)], 0.5, "net")
@example([(1.0, 0.0)], 0.3, "net")
@given(SCORES, st.floats(0.01, 0.9), st.sampled_from(KINDS))
def test_the_mean_loss_says_what_the_promise_says(pairs: list[tuple[float, float]], drop: float, kind: Kind) -> None:
    """Losses lie in [0, 1], and their mean is within the limit exactly when the observed loss is within max-drop."""
    never, released = np.array(pairs).T
    losses = request_losses(kind, never, released[:, None], drop)
    assert losses.min() >= 0
    assert losses.max() <= 1
    margin = float(limit(kind, drop)) - losses.mean()
    seen = observed(kind, never, released)
    if seen is None:  # S = 0 throughout: nothing can be lost, but in the net loss something can be gained
        assert margin == pytest.approx(released.mean() / (2 - drop) if kind == "net" else 0)
    else:
        scale = {"relative": never.mean(), "net": never.mean() / (2 - drop), "absolute": 1.0, "signed": 0.5}[kind]
        assert margin == pytest.approx((drop - seen) * scale, abs=1e-9)


def test_observed_losses_by_hand() -> None:
    """Gains do not offset losses, except in the net and the signed loss."""
    never, released = np.array([1.0, 1.0, 0.0, 0.0]), np.array([0.5, 1.0, 0.25, 0.0])
    assert observed("absolute", never, released) == 0.125
    assert observed("relative", never, released) == 0.25
    assert observed("net", never, released) == 0.125
    assert observed("signed", never, released) == pytest.approx(0.0625)
    assert observed("relative", np.zeros(4), released) is None


@pytest.mark.parametrize("kind", KINDS)
def test_p_values_take_a_max_drop_per_column(kind: Kind) -> None:
    """One R under several max-drops gives what each max-drop gives alone."""
    never, released = harmed(400, 0.6, 8)
    drops = np.array([0.02, 0.05, 0.3])
    alone = [p_values(kind, never, released[:, None], float(d), 0.1)[0] for d in drops]
    np.testing.assert_allclose(p_values(kind, never, released[:, None], drops, 0.1), alone)


@pytest.mark.parametrize("kind", KINDS)
def test_certifiable_is_where_harmless_requests_begin_to_pass(kind: Kind) -> None:
    """With no request harmed, a max-drop at `certifiable` passes and one 10 % below does not."""
    for n in (100, 500, 3000):
        never, released = harmed(n, 0.5, 0)
        best = certifiable(kind, never, 0.1)
        assert best is not None
        at, below = (p_values(kind, never, released[:, None], best * f, 0.1)[0] for f in (1, 0.9))
        assert at <= 0.1 < below, (n, best, at, below)


def test_certifiable_at_the_numbers_of_the_design() -> None:
    """At Q = 0.5, n = 500 can certify a relative drop of 1 %, and no less than 0.9 %; without any score, nothing."""
    never, _ = harmed(500, 0.5, 0)
    best = certifiable("relative", never, 0.1)
    assert best is not None
    assert 0.009 < best <= 0.01
    assert certifiable("relative", np.zeros(500), 0.1) is None


@pytest.mark.parametrize("kind", KINDS)
def test_requests_needed_is_about_right(kind: Kind) -> None:
    """1.5 times as many requests as `requests_needed` pass most of the time, a quarter of them hardly ever."""
    never, released = harmed(1000, 0.6, 15)
    needed = requests_needed(kind, never, released, 0.05, 0.1)
    assert needed is not None
    rng = np.random.default_rng(1)

    def passes(n: int) -> int:
        rows = [rng.integers(0, 1000, n) for _ in range(60)]
        return sum(int(p_values(kind, never[i], released[i][:, None], 0.05, 0.1)[0] <= 0.1) for i in rows)

    assert passes(int(1.5 * needed)) > 40
    assert passes(needed // 4) < 30


@pytest.mark.parametrize("kind", KINDS)
def test_no_number_of_requests_helps_a_loss_above_max_drop(kind: Kind) -> None:
    """A loss at or above max-drop cannot be certified at any n."""
    never, released = harmed(1000, 0.5, 60)
    assert requests_needed(kind, never, released, 0.05, 0.1) is None


@pytest.mark.parametrize("kind", KINDS)
def test_upper_bound_covers_and_is_consistent(kind: Kind) -> None:
    """The bound covers the true loss in at least 1 - level of 120 draws, the observed one always, and falls with n."""
    rng = np.random.default_rng(2)
    truth = {"relative": 0.05, "net": 0.05, "absolute": 0.03, "signed": 0.03}[kind]
    below, bounds = 0, []
    for _ in range(120):
        never = (rng.random(500) < 0.6).astype(np.float64)
        released = never * (rng.random(500) >= 0.05)
        bound, seen = upper_bound(kind, never, released, 0.1), observed(kind, never, released)
        assert bound is not None
        assert seen is not None
        assert bound > seen
        below += bound < truth
        bounds.append(bound)
    assert stats.binomtest(below, 120, 0.1, alternative="greater").pvalue > 0.001
    never = (rng.random(8000) < 0.6).astype(np.float64)
    larger = upper_bound(kind, never, never * (rng.random(8000) >= 0.05), 0.1)
    assert larger is not None
    assert truth * 0.9 < larger < np.mean(bounds)


def test_upper_bound_agrees_with_the_test() -> None:
    """A bound at or below a max-drop of the grid means that this max-drop passes, and the next one below does not."""
    never, released = harmed(800, 0.5, 6)
    bound = upper_bound("relative", never, released, 0.1)
    assert bound is not None
    assert p_values("relative", never, released[:, None], bound, 0.1)[0] <= 0.1
    assert p_values("relative", never, released[:, None], bound * 0.9, 0.1)[0] > 0.1


def test_upper_bound_may_not_exist() -> None:
    """Where every request is harmed, no bound below 1 holds."""
    never, released = harmed(50, 1.0, 50)
    assert upper_bound("absolute", never, released, 0.1) is None
