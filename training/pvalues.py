"""p-values for "the mean loss is above alpha": what lets a threshold carry a guarantee.

Both are valid for any independent losses in [0, 1], at any n: P(p <= u) <= u for every u when the mean is >= alpha.

- `betting_p_values`: a gambler bets against "the mean is alpha" one loss after the other; by Ville's inequality the
  chance that the capital ever reaches 1/u is at most u. Uses the losses one by one, so it gains from small variance.
- `hoeffding_bentkus_p_values`: from the mean alone (Learn then Test, arXiv 2110.01052, Proposition 1), by MAPIE.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

PRIOR_LOSSES = 10
"""How many losses the bets' first guess of the variance, that of a 0/1 loss with mean alpha, is worth."""


def betting_p_values(losses: Floats, alpha: float | Floats, *, level: float, seed: int = 0) -> Floats:
    """p-values [k] of H0: E[loss] >= alpha, from losses [n, k] in [0, 1]; `alpha` is one number in (0, 1) or k of them.

    With the rows in an order that `seed` fixes (the same for every column), capital K_0 = 1 and

        K_t = K_{t-1} (1 + l_t (alpha - L_t)),    p = min over t of 1 / K_t, at most 1.

    This is the capital process of Waudby-Smith & Ramdas ("Estimating means of bounded random variables by betting",
    arXiv 2010.09686, Theorem 2 and Section 4). Any bet l_t in [0, 1/(1 - alpha)] that is known before L_t keeps
    it a supermartingale under H0, so the choice of bets decides the power and never the validity. Theirs for a test
    at one level and a fixed n is l = sqrt(2 log(1/level) / (n v)). Ours asks the same question anew at each step, with
    what is left to win and the losses that are left to win it:

        l_t = min(1 / (1 - alpha), sqrt(2 log(1 / (u K_{t-1})) / ((n - t + 1) v_{t-1}))),

    u the first of level, level^2, … that 1 / K has not reached yet (beyond the first it only makes p more telling).

    v is not the variance seen but that which the losses would have if their mean were alpha: the gains g = max(0,
    alpha - L) as seen, and losses h = max(0, L - alpha) of the sizes seen, as many as would balance the gains:
    v = mean g^2 + mean g (sum h^2 / sum h). All sums start with `PRIOR_LOSSES` losses of a 0/1 loss of mean alpha. So a
    task that was never harmed so far does not look as if it could not be, and requests that say nothing
    (L = alpha) take no part. For 0/1 losses the power at `level` is that of the exact binomial test to within a few
    points. The p-value is valid at every level but has this power at `level` only.
    """
    n, k = losses.shape
    a = np.broadcast_to(np.asarray(alpha, dtype=np.float64), (k,))
    goal, most = -np.log(level), 1 / (1 - a)
    wealth, best = np.zeros(k), np.zeros(k)  # logarithms
    gains, gains_squared = PRIOR_LOSSES * a * (1 - a), PRIOR_LOSSES * a**2 * (1 - a)
    losses_sum, losses_squared = PRIOR_LOSSES * a * (1 - a), PRIOR_LOSSES * a * (1 - a) ** 2
    with np.errstate(divide="ignore"):  # a lost all-in bet: the logarithm of no capital is -inf, and stays there
        for t, row in enumerate(np.random.default_rng(seed).permutation(n)):
            variance = (gains_squared + gains * losses_squared / losses_sum) / (PRIOR_LOSSES + t)
            to_win = goal * (np.floor(best / goal) + 1) - wealth
            bet = np.minimum(np.sqrt(2 * to_win / ((n - t) * variance)), most)
            step = a - losses[row]
            wealth += np.log1p(np.maximum(bet * step, -1))
            np.maximum(best, wealth, out=best)
            gain, loss = np.maximum(step, 0), np.maximum(-step, 0)
            gains += gain
            losses_sum += loss
            gains_squared += gain * gain
            losses_squared += loss * loss
    return np.exp(-best)


def hoeffding_bentkus_p_values(means: Floats, n: int, alpha: float | Floats) -> Floats:
    """p-values of H0: E[loss] >= alpha from mean losses over n requests.

    p = min(exp(-n h1(min(mean, alpha), alpha)), e P(Bin(n, alpha) <= ceil(n mean))), h1 the binary relative entropy.
    One of `means` [k] and `alpha` may be longer than 1: the result has that length.
    """
    from mapie.risk_control.methods import compute_hoeffding_bentkus_p_value

    # n * mean of a whole number of losses may come out a hair above it, and ceil would count one loss too many.
    below = np.atleast_1d(np.asarray(means, dtype=np.float64)) * (1 - 1e-12)
    alphas = np.atleast_1d(np.asarray(alpha, dtype=np.float64))
    if len(below) > 1 and len(alphas) > 1:
        raise ValueError("give several means or several alphas, not both")
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(compute_hoeffding_bentkus_p_value(below, int(n), alphas), dtype=np.float64).reshape(-1)
