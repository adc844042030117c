"""The p-values against their definitions, and against what a p-value promises: P(p <= u) <= u under H0."""

import math

import numpy as np
import pytest
from scipy import stats

from lorazor.training.pvalues import PRIOR_LOSSES, Floats, betting_p_values, hoeffding_bentkus_p_values


def literal_betting(losses: list[float], alpha: float, level: float) -> float:
    """The docstring of `betting_p_values`, one loss at a time, with capital itself in place of its logarithm."""
    n, capital, best = len(losses), 1.0, 1.0
    gains = [(alpha, PRIOR_LOSSES * (1 - alpha))]  # (size, how many): the prior's gains and losses
    harms = [(1 - alpha, PRIOR_LOSSES * alpha)]
    for t, loss in enumerate(losses, start=1):
        count = PRIOR_LOSSES + t - 1
        mean_gain, mean_gain2 = (sum(k * g**power for g, k in gains) / count for power in (1, 2))
        size = sum(k * h**2 for h, k in harms) / sum(k * h for h, k in harms)
        variance = mean_gain2 + mean_gain * size
        u = level
        while best >= 1 / u:
            u *= level
        to_win = math.log(1 / (u * capital)) if capital > 0 else math.inf
        bet = min(1 / (1 - alpha), math.sqrt(2 * to_win / ((n - t + 1) * variance)))
        capital *= max(0.0, 1 + bet * (alpha - loss))
        best = max(best, capital)
        gains.append((max(0.0, alpha - loss), 1))
        harms.append((max(0.0, loss - alpha), 1))
    return 1 / best


@pytest.mark.parametrize("alpha", [0.01, 0.05, 0.3, 0.51])
def test_betting_equals_its_definition(alpha: float) -> None:
    """The vectorised p-value is the literal one for 0/1, graded, constant and harmless losses alike."""
    rng = np.random.default_rng(1)
    n, seed = 150, 7
    columns = [rng.random(n) < alpha / 3, rng.beta(0.3, 3, n), np.full(n, alpha), np.zeros(n), np.ones(n)]
    losses = np.column_stack(columns).astype(np.float64)
    order = np.random.default_rng(seed).permutation(n)
    wanted = [literal_betting([float(x) for x in column[order]], alpha, 0.1) for column in losses.T]
    np.testing.assert_allclose(betting_p_values(losses, alpha, level=0.1, seed=seed), wanted, rtol=1e-9)


def test_betting_takes_an_alpha_per_column() -> None:
    """Columns with their own alpha give what separate calls give."""
    losses = np.random.default_rng(2).beta(0.2, 4, (300, 3))
    alphas = np.array([0.03, 0.06, 0.2])
    together = betting_p_values(losses, alphas, level=0.1)
    alone = [betting_p_values(losses[:, [i]], float(a), level=0.1)[0] for i, a in enumerate(alphas)]
    np.testing.assert_array_equal(together, alone)


def null_losses(name: str, alpha: float, n: int, draws: int) -> Floats:
    """Losses [n, draws] whose mean is alpha exactly: the hardest null."""
    rng = np.random.default_rng(3)
    if name == "harm":
        return (rng.random((n, draws)) < alpha).astype(np.float64)
    if name == "relative":  # half the requests say nothing (S = 0), the others are harmed with probability alpha
        solved = rng.random((n, draws)) < 0.5
        return np.where(solved, rng.random((n, draws)) < alpha, alpha)
    if name == "signed":  # mostly ties
        u = rng.random((n, draws))
        lost = 0.1 + alpha - 0.5
        return np.where(u < lost, 1.0, np.where(u < lost + 0.1 - (alpha - 0.5), 0.0, 0.5))
    return rng.beta(0.2, 0.2 / alpha * (1 - alpha), (n, draws))


@pytest.mark.parametrize(
    ("name", "alpha"), [("harm", 0.01), ("harm", 0.2), ("relative", 0.05), ("signed", 0.51), ("graded", 0.05)]
)
@pytest.mark.parametrize("n", [40, 400])
def test_betting_is_super_uniform(name: str, alpha: float, n: int) -> None:
    """Where the mean loss is alpha, p <= u happens in at most u of 4,000 draws, within Monte-Carlo error."""
    draws = 4000
    p = betting_p_values(null_losses(name, alpha, n, draws), alpha, level=0.1)
    for u in (0.01, 0.05, 0.1, 0.2, 0.5):
        hits = int((p <= u).sum())
        assert stats.binomtest(hits, draws, u, alternative="greater").pvalue > 1e-4, (u, hits / draws)


def test_super_uniformity_can_fail() -> None:
    """The test above has teeth: p-values of losses whose mean is below alpha are not super-uniform."""
    losses = null_losses("harm", 0.01, 400, 2000)
    hits = int((betting_p_values(losses, 0.015, level=0.1) <= 0.1).sum())
    assert stats.binomtest(hits, 2000, 0.1, alternative="greater").pvalue < 1e-4


def relative(n: int, harmed: int, q: float, m: float) -> Floats:
    """Relative losses [n, 400] with exactly `harmed` of the round(q n) solved requests harmed, in random orders."""
    loss = np.full(n, m)
    loss[: round(q * n)] = 0
    loss[:harmed] = 1
    return np.random.default_rng(4).permuted(np.tile(loss, (400, 1)), axis=1).T


def test_power_where_losses_are_rare() -> None:
    """At Q = 0.5 a relative 1 % passes with no harmed request at n = 500, and with ten at n = 4,000."""
    assert (betting_p_values(relative(500, 0, 0.5, 0.01), 0.01, level=0.1) <= 0.1).all()
    assert (betting_p_values(relative(500, 1, 0.5, 0.01), 0.01, level=0.1) <= 0.1).mean() < 0.1
    assert (betting_p_values(relative(4000, 10, 0.5, 0.01), 0.01, level=0.1) <= 0.1).mean() > 0.95
    assert (betting_p_values(relative(4000, 20, 0.5, 0.01), 0.01, level=0.1) <= 0.1).mean() < 0.15


def test_power_is_that_of_the_exact_binomial_test() -> None:
    """For 0/1 losses below alpha, betting rejects within five points of as often as the exact test does."""
    rng = np.random.default_rng(5)
    for n, alpha, mean in ((250, 0.05, 0.02), (1000, 0.05, 0.035), (2000, 0.01, 0.005)):
        losses = (rng.random((n, 2000)) < mean).astype(np.float64)
        ours = (betting_p_values(losses, alpha, level=0.1) <= 0.1).mean()
        exact = (stats.binom.cdf(losses.sum(axis=0), n, alpha) <= 0.1).mean()
        assert ours > exact - 0.05, (n, ours, exact)


@pytest.mark.parametrize("n", [20, 500])
def test_hoeffding_bentkus_equals_the_paper(n: int) -> None:
    """Proposition 1 of arXiv 2110.01052, written out, for means below, at and above alpha."""
    for alpha in (0.01, 0.05, 0.3):
        for count in sorted({0, 1, n // 50, n // 10, n // 2, n}):
            mean = count / n
            a = min(mean, alpha)
            h1 = (a * math.log(a / alpha) if a else 0.0) + (1 - a) * math.log((1 - a) / (1 - alpha))
            wanted = min(math.exp(-n * h1), math.e * float(stats.binom.cdf(count, n, alpha)))
            got = hoeffding_bentkus_p_values(np.array([mean]), n, alpha)
            np.testing.assert_allclose(got, [wanted], rtol=1e-6)


def test_hoeffding_bentkus_takes_several_means_or_alphas() -> None:
    """Several means, or several alphas, give what separate calls give; both at once is refused."""
    means, alphas = np.array([0.0, 0.02, 0.1]), np.array([0.05, 0.1])
    one = [float(hoeffding_bentkus_p_values(np.array([m]), 100, 0.05)[0]) for m in means]
    np.testing.assert_allclose(hoeffding_bentkus_p_values(means, 100, 0.05), one)
    each = [float(hoeffding_bentkus_p_values(means[1:2], 100, float(a))[0]) for a in alphas]
    np.testing.assert_allclose(hoeffding_bentkus_p_values(means[1:2], 100, alphas), each)
    with pytest.raises(ValueError, match="not both"):
        hoeffding_bentkus_p_values(means, 100, alphas)


def test_hoeffding_bentkus_is_super_uniform() -> None:
    """Under the null, P(p <= u) <= u."""
    draws, n, alpha = 4000, 300, 0.05
    means = (np.random.default_rng(6).random((draws, n)) < alpha).mean(axis=1)
    p = hoeffding_bentkus_p_values(means, n, alpha)
    for u in (0.05, 0.1, 0.3):
        assert stats.binomtest(int((p <= u).sum()), draws, u, alternative="greater").pvalue > 1e-4
