"""What "max-drop" means, as a loss in [0, 1] per request and a limit on its mean; and the tests of that limit.

| kind | promise | loss L | limit on E L | p-value |
|---|---|---|---|---|
| relative m | E max(0, S - R) <= m E S | max(0, S - R) + m (1 - S) | m | betting |
| net m | E (S - R) <= m E S, hence drop <= m | (1 - m + S - R + m (1 - S)) / (2 - m) | 1 / (2 - m) | betting |
| absolute d | E max(0, S - R) <= d | max(0, S - R) | d | Hoeffding-Bentkus |
| signed d | E (S - R) <= d, S and R being different draws | (1 + S - R) / 2 | (1 + d) / 2 | betting |

Relative counts every answer that got worse; net lets those that got better make up for them, so it limits the drop,
which is what papers call the accuracy loss. Signed is for sampling with a temperature, where a lower R may be chance;
its d is in points of the score.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from scipy.special import rel_entr

from lorazor.training.ltt import fixed_sequence
from lorazor.training.pvalues import Floats, betting_p_values, hoeffding_bentkus_p_values

Kind = Literal["relative", "net", "absolute", "signed"]
LOOSEST_BUDGET: dict[Kind, float] = {"net": 0.25}
"""Per kind, the part of the level that tests the loosest threshold before all others (ltt.keep); none: 0.

A net loss may be smallest there, where the answers that got better are the most, and a walk would end on the way: an
adapter that was made for it is best released after the prompt or not at all.
"""
BOUND_GRID: Floats = np.concatenate([np.geomspace(1e-4, 0.02, 80, endpoint=False), np.linspace(0.02, 0.98, 193)])
"""The max-drops at which `upper_bound` tests: steps of at most 7 % below 0.02, and of 0.005 above."""


def request_losses(kind: Kind, never: Floats, released: Floats, max_drop: float | Floats) -> Floats:
    """Losses [n, k] in [0, 1] from S [n] and R [n, k]; `max_drop`: one, or k."""
    s = never[:, None]
    if kind == "signed":
        return (1 + s - released) / 2
    if kind == "net":
        kept = 1 - max_drop  # so written, no rounding leads out of [0, 1]
        return (1 - released + kept * s) / (1 + kept)
    harm = np.maximum(0, s - released)
    return harm + max_drop * (1 - s) if kind == "relative" else harm


def limit(kind: Kind, max_drop: float | Floats) -> float | Floats:
    """What the mean of `request_losses` may not exceed."""
    if kind == "net":
        return 1 / (2 - max_drop)
    return (1 + max_drop) / 2 if kind == "signed" else max_drop


def observed(kind: Kind, never: Floats, released: Floats) -> float | None:
    """The number that max-drop limits, as seen in S [n] and R [n]; None where it is a ratio to mean S = 0."""
    difference = never - released
    if kind == "signed":
        return float(difference.mean())
    lost = float((difference if kind == "net" else np.maximum(0, difference)).mean())
    if kind == "absolute":
        return lost
    mean = float(never.mean())
    return lost / mean if mean else None


def p_values(kind: Kind, never: Floats, released: Floats, max_drop: float | Floats, level: float) -> Floats:
    """p-values [k] of "the promise is broken" for R [n, k], with one max-drop or (for R of one column) k of them."""
    if kind == "absolute":
        means = request_losses(kind, never, released, max_drop).mean(axis=0)
        return hoeffding_bentkus_p_values(means[:1] if np.ndim(max_drop) else means, len(never), max_drop)
    losses = request_losses(kind, never, released, max_drop)
    limits = np.broadcast_to(limit(kind, max_drop), np.broadcast_shapes(np.shape(max_drop), losses.shape[1:]))
    return betting_p_values(np.broadcast_to(losses, (len(never), len(limits))), limits, level=level)


def upper_bound(kind: Kind, never: Floats, released: Floats, level: float) -> float | None:
    """An upper confidence bound, at 1 - level, on what max-drop limits, for one R [n]: the same p-value, inverted.

    The max-drops of `BOUND_GRID` are tested from the largest down, each at `level`; the bound is the last that passed
    (fixed-sequence testing again, so the bound is valid even where p is not monotone). None when not even the
    largest passes. It is a bound for one threshold that was given: choosing the threshold on the same data is what
    the Learn-then-Test guarantee accounts for, and this bound does not.
    """
    tested = p_values(kind, never, released[:, None], BOUND_GRID[::-1], level)
    last = fixed_sequence(tested, level)
    return None if last is None else float(BOUND_GRID[::-1][last])


def certifiable(kind: Kind, never: Floats, level: float) -> float | None:
    """The smallest max-drop of `BOUND_GRID` that these S [n] could certify, were no request's score to change.

    For relative and net losses it is close to 1 - level^(1 / sum S). None when not even the largest passes.
    """
    return upper_bound(kind, never, never, level)


def requests_needed(kind: Kind, never: Floats, released: Floats, max_drop: float, level: float) -> int | None:
    """About how many requests like these let R [n] pass at `max_drop` more often than not; None when no number would.

    n = log(1/level) / g: for betting, g is the most that the logarithm of the capital can grow per request with a
    constant bet; for Hoeffding-Bentkus it is Hoeffding's relative entropy h1(mean, max_drop).
    """
    losses = request_losses(kind, never, released[:, None], max_drop)[:, 0]
    a, mean = float(limit(kind, max_drop)), float(losses.mean())
    if mean >= a:
        return None
    if kind == "absolute":
        growth = float(rel_entr(mean, a) + rel_entr(1 - mean, 1 - a))
    else:
        bets = np.linspace(0, 1, 201)[1:] / (1 - a)
        with np.errstate(divide="ignore"):
            growth = max(float(np.log1p(np.maximum(bet * (a - losses), -1)).mean()) for bet in bets)
    return int(np.ceil(-np.log(level) / growth)) if growth > 0 else None
