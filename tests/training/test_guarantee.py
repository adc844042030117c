"""The guarantee itself, by Monte-Carlo: 300 calibration draws of planted data against the truth of 200,000 requests."""

from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import pytest
from scipy import stats

from lorazor.training.losses import LOOSEST_BUDGET, Kind, observed, p_values
from lorazor.training.ltt import fixed_sequence, keep
from tests.planted import Population

DRAWS, N, TRUTH = 300, 1000, 200_000
CASES: list[tuple[Kind, Population]] = [
    ("relative", Population()),
    ("relative", Population(graded=True)),
    ("net", Population()),
    ("net", Population(graded=True)),
    ("absolute", Population()),
    ("absolute", Population(graded=True)),
    ("signed", Population(greedy=False)),
    ("signed", Population()),
]
IDS = [f"{kind}{'-graded' if p.graded else ''}{'' if p.greedy else '-sampled'}" for kind, p in CASES]


@dataclass(frozen=True)
class Tuned:
    """Per draw, the index of the threshold kept by Learn then Test (-1: never) and by the observed loss alone."""

    kept: list[int]
    naive: list[int]


@cache
def truth(kind: Kind, population: Population) -> tuple[list[float], list[float]]:
    """The true loss and the active share at each threshold, from 200,000 requests."""
    never, released, share = population.draw(TRUTH, seed=1)
    losses = [observed(kind, never, released[:, k]) for k in range(released.shape[1])]
    return [loss or 0.0 for loss in losses], list(share.mean(axis=0))


@cache
def tuned(kind: Kind, population: Population, max_drop: float, confidence: float, n: int = N) -> Tuned:
    """All draws at once: the columns of the loss matrix are (draw, threshold)."""
    never, released, _ = population.draw(DRAWS * n, seed=2)
    k = released.shape[1]
    s, r = never.reshape(DRAWS, n), released.reshape(DRAWS, n, k)
    level = 1 - confidence
    if kind == "absolute":
        p = np.stack([p_values(kind, s[d], r[d], max_drop, level) for d in range(DRAWS)])
        found = keep(lambda some, _: p[:, some], k, level, 0.0)
    else:
        found = keep(partial(_betting, kind, s, r, max_drop), k, level, LOOSEST_BUDGET.get(kind, 0.0))
    kept = [one.index for one in found]
    seen = np.array([[observed(kind, s[d], r[d, :, j]) or 0.0 for j in range(k)] for d in range(DRAWS)])
    naive = [fixed_sequence(np.where(row <= max_drop, 0.0, 1.0), level) for row in seen]
    return Tuned([-1 if i is None else i for i in kept], [-1 if i is None else i for i in naive])


def _betting(kind: Kind, s: np.ndarray, r: np.ndarray, max_drop: float, some: slice, level: float) -> np.ndarray:
    """p-values [draws, k]; what `losses.p_values` gives draw by draw (checked below), in one pass over the requests."""
    from lorazor.training.losses import limit, request_losses
    from lorazor.training.pvalues import betting_p_values

    r = r[:, :, some]
    losses = np.concatenate([request_losses(kind, s[d], r[d], max_drop) for d in range(len(s))], axis=1)
    p = betting_p_values(losses, limit(kind, max_drop), level=level).reshape(len(s), -1)
    np.testing.assert_array_equal(p[3], p_values(kind, s[3], r[3], max_drop, level))
    return p


def just_broken(kind: Kind, population: Population) -> tuple[float, int]:
    """A max-drop near 0.05 that one threshold breaks by a hair (the hardest place), and that threshold's index."""
    losses, _ = truth(kind, population)
    index = next(i for i, loss in enumerate(losses) if loss > 0.05)
    return losses[index] * 0.999, index


@pytest.mark.parametrize("confidence", [0.9, 0.75])
@pytest.mark.parametrize(("kind", "population"), CASES, ids=IDS)
def test_the_true_loss_keeps_the_promise(kind: Kind, population: Population, confidence: float) -> None:
    """The true loss exceeds the asked max-drop in at most 1 - confidence of 300 draws, within Monte-Carlo error."""
    max_drop, _ = just_broken(kind, population)
    losses, _ = truth(kind, population)
    broken = sum(i >= 0 and losses[i] > max_drop for i in tuned(kind, population, max_drop, confidence).kept)
    test = stats.binomtest(broken, DRAWS, 1 - confidence, alternative="greater")
    assert test.pvalue > 0.001, f"{broken} of {DRAWS} draws broke the promise"


@pytest.mark.parametrize(("kind", "population"), CASES, ids=IDS)
def test_the_observed_loss_alone_would_break_it(kind: Kind, population: Population) -> None:
    """The test above has teeth: keeping thresholds by their observed loss breaks the promise far too often."""
    max_drop, _ = just_broken(kind, population)
    losses, _ = truth(kind, population)
    broken = sum(i >= 0 and losses[i] > max_drop for i in tuned(kind, population, max_drop, 0.9).naive)
    assert stats.binomtest(broken, DRAWS, 0.1, alternative="greater").pvalue < 0.001


@pytest.mark.parametrize(("kind", "population"), CASES, ids=IDS)
def test_a_safe_threshold_is_found(kind: Kind, population: Population) -> None:
    """In 90 % of draws a threshold is kept whose share is within 0.1 of the best one that keeps the promise."""
    losses, shares = truth(kind, population)
    best = min(share for loss, share in zip(losses, shares, strict=True) if loss <= 0.05)
    n = 3000 if kind == "signed" else N
    found = [i >= 0 and shares[i] <= best + 0.1 for i in tuned(kind, population, 0.05, 0.9, n).kept]
    assert sum(found) >= 0.9 * DRAWS, f"found in {sum(found)} of {DRAWS} draws"


@pytest.mark.parametrize("kind", ["relative", "net", "absolute", "signed"])
def test_never_safe_is_tuned_to_never(kind: Kind) -> None:
    """Where no release is safe and every threshold breaks the promise, at most 1 - confidence of draws keep one."""
    unsafe = Population(thresholds=tuple(np.linspace(2.0, -1.0, 20)), safe=False)
    losses, _ = truth(kind, unsafe)
    assert min(losses) > 0.05
    kept = sum(i >= 0 for i in tuned(kind, unsafe, 0.05, 0.9).kept)
    assert stats.binomtest(kept, DRAWS, 0.1, alternative="greater").pvalue > 0.001
