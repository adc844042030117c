"""Release policies side by side: thresholds chosen on the validation requests, shares and drops measured on the test.

"Judged" numbers are over the requests with S > 0, as design.md asks; those over all requests stand beside them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from lorazor.training.baselines import ReleasePolicy
from lorazor.training.dataset import Tables
from lorazor.training.replay import Curve, Floats, Outcome, ReplayTable, Summary, summarize, sweep

CANDIDATES = 200
NEVER_RELEASED, BASE_ONLY = "never", "base only"


@dataclass(frozen=True)
class Row:
    """One policy of one task at one operating point, on the test requests.

    `limit` is the drop allowed on validation (None where a policy has no operating point to choose), `judged` is None
    when no test request has S > 0.
    """

    policy: str
    limit: float | None
    threshold: float | None
    judged: Summary | None
    everything: Summary


@dataclass(frozen=True, eq=False)
class Comparison:
    """All policies of one task: rows, test curves over S > 0 and the area under retention over share."""

    task: str
    never: Row
    rows: list[Row]
    curves: dict[str, Curve] = field(default_factory=dict)
    area: dict[str, float | None] = field(default_factory=dict)


def compare(
    policies: Sequence[ReleasePolicy], validation: Tables, test: Tables, limits: Sequence[float]
) -> dict[str, Comparison]:
    """Every policy on every task that has test requests."""
    found = {}
    for task, table in test.items():
        never = _row(NEVER_RELEASED, None, None, table, table.outcome(table.first_decision(np.empty(0), None)))
        found[task] = Comparison(task, never, [never, _row(BASE_ONLY, None, None, table, table.base_only())])
    for policy in policies:
        _add(policy, validation, test, limits, found)
    return found


def _add(
    policy: ReleasePolicy,
    validation: Tables,
    test: Tables,
    limits: Sequence[float],
    found: Mapping[str, Comparison],
) -> None:
    seen = {task: policy.score(table) for task, table in validation.items()}
    pooled = candidates(validation, seen)
    grids = {
        task: pooled if policy.shared else candidates({task: validation[task]}, {task: seen[task]}) for task in seen
    }
    curves = {task: sweep(validation[task], seen[task], grids[task], solved_only=True) for task in seen}
    for task, table in test.items():
        scores = policy.score(table)
        mine = list(curves.values()) if policy.shared else [curves[task]]
        for limit in limits:
            threshold = choose(mine, limit)
            outcome = table.outcome(table.first_decision(scores, threshold))
            found[task].rows.append(_row(policy.name, limit, threshold, table, outcome))
        curve = sweep(table, scores, grids[task], solved_only=True)
        found[task].curves[policy.name] = curve
        found[task].area[policy.name] = area(table, curve)


def candidates(tables: Tables, scores: Mapping[str, Floats], size: int = CANDIDATES) -> Floats:
    """Ascending thresholds to try: quantiles of all scores, and of each request's highest one.

    The latter matter because a request releases only if its highest score reaches the threshold.
    """
    every = np.concatenate([s[~np.isnan(s)] for s in scores.values()])
    highest = np.concatenate([_highest(tables[task], s) for task, s in scores.items()])
    levels = np.linspace(0, 1, size)
    picked = [np.quantile(v, levels, method="nearest") for v in (every, highest[~np.isnan(highest)]) if len(v)]
    return np.unique(np.concatenate(picked)) if picked else np.empty(0)


def _highest(table: ReplayTable, scores: Floats) -> Floats:
    starts = table.first[:-1][np.diff(table.first) > 0]
    return np.fmax.reduceat(scores, starts) if len(starts) else np.empty(0)


def choose(curves: Sequence[Curve], limit: float) -> float | None:
    """The threshold of the smallest mean share whose drop is at most `limit` on every curve.

    None (never) when there is none, or when it saves nothing. The curves share their thresholds; of equal shares the
    strictest threshold wins.
    """
    drops = np.stack([curve.drop for curve in curves])
    share = np.mean([curve.share for curve in curves], axis=0)
    allowed = np.flatnonzero((drops <= limit).all(axis=0))
    if not len(allowed) or share[allowed].min() >= 1:
        return None
    least = allowed[share[allowed] <= share[allowed].min() + 1e-12]
    return float(curves[0].threshold[least[-1]])


def area(table: ReplayTable, curve: Curve) -> float | None:
    """Area under retention over active-row share, by trapezoids from share 0 to 1; None where retention is null.

    Every policy may fall back on releasing all requests after the prompt (share 0) and on never (1, 1): the curve is
    closed with these two points. A straight line between two points is what mixing two policies by a coin gives.
    """
    solved = table.subset(table.solved)
    if not len(solved):
        return None
    prompt_only = sweep(solved, np.where(solved.step == 0, 0.0, np.nan), [0.0])
    share = np.concatenate([prompt_only.share, curve.share, [1.0]])
    retention = np.concatenate([prompt_only.retention, curve.retention, [1.0]])
    if np.isnan(retention).any():
        return None
    order = np.lexsort((retention, share))
    return float(np.trapezoid(retention[order], share[order]))


def _row(name: str, limit: float | None, threshold: float | None, table: ReplayTable, outcome: Outcome) -> Row:
    judged = summarize(table, outcome, solved_only=True) if table.solved.any() else None
    return Row(name, limit, threshold, judged, summarize(table, outcome))
