"""Stage `guarantee`: does the promise of `tune` hold?

Requests that no policy was trained on make a pool. Calibration sets are drawn from it with replacement, so the pool's
own loss at a threshold is the truth: the share of draws that keep a threshold of a larger true loss than was allowed
may be at most 1 - confidence. drift.py has what happens when requests change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
from scipy import stats

from lorazor.features.errors import InputError
from lorazor.training.learned import LEARNED, lightgbm_policy
from lorazor.training.losses import LOOSEST_BUDGET, Kind, limit, observed, request_losses
from lorazor.training.ltt import Kept, keep
from lorazor.training.pvalues import betting_p_values
from lorazor.training.replay import Floats, Ints
from lorazor.training.study.cells import Parts, Rated, load_parts, rate
from lorazor.training.study.drift import drift_rows
from lorazor.training.study.layout import Cell, Layout
from lorazor.training.study.policies import Promise
from lorazor.training.study.results import Results

TOGETHER = 10_000_000  # losses (request, draw, threshold) that are tested together: 80 MB
Row = dict[str, Any]


def guarantee(
    layout: Layout,
    cells: Iterable[Cell],
    promise: Promise,
    *,
    draws: int,
    seed: int,
    progress: Callable[[str], None],
) -> None:
    """Add every cell to guarantee.csv and drift.csv; one without a policy is told and left out."""
    table, drifts = Results(layout.csv("guarantee")), Results(layout.csv("drift"))
    for cell in cells:
        if table.has(cell.row()):
            continue
        progress(f"guarantee: {cell}")
        parts = load_parts(layout, cell, seed)
        try:
            policy = learnt(parts)
        except InputError as error:
            progress(f"  left out: {error}")
            continue
        if not drifts.has(cell.row()):
            drifts.add({**cell.row(), **row} for row in drift_rows(parts, policy, promise))
        table.add({**cell.row(), **row} for row in guarantee_rows(policy, promise, draws, seed))


def learnt(parts: Parts) -> Rated:
    """The policy that ships; InputError where there is nothing to learn."""
    return rate(lightgbm_policy(LEARNED, parts.data, seed=parts.seed, threads=1), parts)


def guarantee_rows(policy: Rated, promise: Promise, draws: int, seed: int) -> Iterator[Row]:
    """A row per limit: how often the truth exceeded it, and whether that is too often."""
    never, released, share = pooled(policy)
    n = len(policy.calibrate.table)
    drawn = np.random.default_rng(seed).integers(0, len(never), (draws, n))
    for kind, max_drop in promise.limits:
        kept = kept_thresholds(never, released, drawn, kind, max_drop, promise.confidence)
        head = {"loss_kind": kind, "max_drop": max_drop, "confidence": promise.confidence}
        found = verdict(kept, never, released, share, kind, max_drop, promise.confidence)
        yield {**head, "n": n, "pool": len(never), **found}


def kept_thresholds(
    never: Floats, released: Floats, drawn: Ints, kind: Kind, max_drop: float, confidence: float
) -> Ints:
    """The index of the threshold that each draw ([draws, n] request indices) keeps, -1 for never.

    What `tune` does draw by draw. Its last step, by which a threshold that saves nothing becomes never, is left out: it
    could only lower the truth.
    """
    level, k = 1 - confidence, released.shape[1]
    if not k:
        return np.full(len(drawn), -1, dtype=np.int64)
    losses = request_losses(kind, never, released, max_drop)
    found: list[Kept] = []
    for some in np.array_split(drawn, max(1, -(-drawn.size * k // TOGETHER))):
        found += keep(
            partial(_p_values, losses[some.T], float(limit(kind, max_drop))), k, level, LOOSEST_BUDGET.get(kind, 0.0)
        )
    return np.array([-1 if one.index is None else one.index for one in found], dtype=np.int64)


def _p_values(losses: Floats, most: float, some: slice, level: float) -> Floats:
    """Of these thresholds, [draws, thresholds], from losses [n, draws, k]: (draw, threshold) are one test's columns."""
    columns = losses[:, :, some]
    return betting_p_values(columns.reshape(len(columns), -1), most, level=level).reshape(columns.shape[1:])


def verdict(
    kept: Ints, never: Floats, released: Floats, share: Floats, kind: Kind, max_drop: float, confidence: float
) -> Row:
    """`broken` of the draws kept a threshold whose true loss is above max-drop; `p_value`: that it is chance."""
    truth = np.array([observed(kind, never, column) or 0.0 for column in released.T])
    found, held = np.append(truth, 0.0)[kept], np.append(share, 1.0)[kept]  # -1, never, takes the last
    broken = int((found > max_drop).sum())
    test = stats.binomtest(broken, len(kept), 1 - confidence, alternative="greater")
    return {
        **{"draws": len(kept), "never": int((kept < 0).sum()), "broken": broken, "p_value": float(test.pvalue)},
        **{"mean_true_loss": float(found.mean()), "worst_true_loss": float(found.max())},
        "active_row_share": float(held.mean()),
    }


def pooled(policy: Rated) -> tuple[Floats, Floats, Floats]:
    """S [n] and R [n, k] of calibration and test requests together, and the active-row share [k] at each threshold."""
    never, released, held, steps = [], [], [], 0
    for scored in (policy.calibrate, policy.test):
        table = scored.table
        outcomes = [table.outcome(table.first_decision(scored.scores, float(t))) for t in policy.grid]
        never.append(table.score)
        released.append(np.array([o.score for o in outcomes]).reshape(-1, len(table)).T)
        held.append([int((o.release - 1).sum()) for o in outcomes])
        steps += int((table.length - 1).sum())
    return np.concatenate(never), np.concatenate(released), np.sum(held, axis=0) / max(1, steps)
