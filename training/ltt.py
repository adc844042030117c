"""Learn then Test (arXiv 2110.01052) by fixed-sequence testing: from p-values to the one threshold that is kept.

The order of the tests is fixed before the calibration data are read, so each may use the whole level: the first
threshold that breaks the promise is reached only through itself, and passing it has a chance of at most the level.

With a second start (the same paper, Algorithm 1) the error budget is divided: a part of the level tests the loosest
threshold at once, the rest walks there from the strictest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lorazor.training.pvalues import Floats


def fixed_sequence(p_values: Floats, level: float) -> int | None:
    """The index of the last threshold that passed; None when the first fails.

    `p_values` [k] are in the order of testing, the strictest (highest) threshold first. Each is tested at `level` =
    1 - confidence, and the first p > level ends the tests whatever follows it. NaN fails.
    """
    failed = np.flatnonzero(~(np.asarray(p_values) <= level))
    passed = len(p_values) if not len(failed) else int(failed[0])
    return passed - 1 if passed else None


@dataclass(frozen=True)
class Kept:
    """The index of the threshold that is kept, None for none; `p_value`: its own or, for none, the strictest's."""

    index: int | None
    p_value: float


def keep(p_values: Callable[[slice, float], Floats], k: int, level: float, loosest_budget: float) -> list[Kept]:
    """What each of several calibration sets keeps of `k` (1 or more) thresholds, the strictest first.

    Args:
        p_values: those of some thresholds, [sets, thresholds], best used at the level that is given.
        loosest_budget: the part of the level, below 1, that tests the loosest threshold first; 0: one start.
    """
    end, walk = level * loosest_budget, level * (1 - loosest_budget)
    loosest = p_values(slice(k - 1, k), end)[:, 0] if loosest_budget else np.full(1, np.inf)
    rows = p_values(slice(0, k), walk)
    return [
        Kept(k - 1, float(p)) if p <= end else _walked(row, walk)
        for p, row in zip(np.broadcast_to(loosest, len(rows)), rows, strict=True)
    ]


def _walked(row: Floats, level: float) -> Kept:
    last = fixed_sequence(row, level)
    return Kept(last, float(row[last or 0]))
