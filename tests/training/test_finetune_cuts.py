"""Release steps as training draws them: where they may lie, how often, and on what they depend."""

import math
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from lorazor.training.finetune_cuts import Cut, Cuts, example_rng, log_uniform

SHARES = st.tuples(st.floats(0, 1), st.floats(0, 1)).map(lambda pair: (pair[0], (1 - pair[0]) * pair[1]))


@given(st.sampled_from(Cut), SHARES, st.integers(1, 5000), st.integers())
def test_a_release_step_lies_in_the_target(cut: Cut, shares: tuple[float, float], length: int, seed: int) -> None:
    """1 <= r <= target tokens; never and prompt are the ends, whatever the shares."""
    release = Cuts(cut, *shares).draw(length, Random(seed))
    assert 1 <= release <= length
    if cut is not Cut.RELEASE_AWARE:
        assert release == (1 if cut is Cut.PROMPT else length)


@given(st.integers(1, 200), st.integers(0, 2**32))
def test_log_uniform_has_its_distribution(most: int, seed: int) -> None:
    """P(r <= k) = log(k + 1) / log(most + 1) within five standard errors, at every k."""
    rng, n = Random(seed), 2000
    drawn = [log_uniform(most, rng) for _ in range(n)]
    for k in range(1, most + 1):
        share = math.log(k + 1) / math.log(most + 1)
        assert abs(sum(r <= k for r in drawn) / n - share) <= 5 * math.sqrt(share * (1 - share) / n) + 1e-9


def test_the_default_shares_are_kept() -> None:
    """Half after the prompt, three tenths log-uniform, a fifth never; a log-uniform draw may give an end too."""
    length, n = 999, 20_000
    drawn = [Cuts().draw(length, Random(i)) for i in range(n)]
    ends = 0.3 * math.log(2) / math.log(length + 1)
    assert abs(drawn.count(1) / n - 0.5 - ends) < 0.02
    assert abs(drawn.count(length) / n - 0.2) < 0.02


@given(st.integers(0, 9), st.integers(0, 99), st.integers(0, 99))
def test_draws_depend_on_seed_step_and_example_alone(seed: int, step: int, example: int) -> None:
    """The same three give the same draw, each other one another stream."""
    drawn = example_rng(seed, step, example).random()
    assert drawn == example_rng(seed, step, example).random()
    others = [(seed + 1, step, example), (seed, step + 1, example), (seed, step, example + 1)]
    assert drawn not in [example_rng(*other).random() for other in others]
