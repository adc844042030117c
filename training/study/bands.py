"""Score kept over active-row share, with bootstrap bands, and over the tokens since the release."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lorazor.training.replay import Bools, Floats, Outcome, ReplayTable
from lorazor.training.study.cells import Rated

RESAMPLES, POINTS = 400, 24
BAND = (0.05, 0.95)
EDGES = (8, 16, 32, 64, 128)


def band_rows(rated: Sequence[Rated], seed: int) -> Iterator[dict[str, Any]]:
    """A row per policy and threshold of its grid, on the test requests with S > 0."""
    for policy in rated:
        table, last = policy.test.table, len(policy.grid) - 1
        for index in np.unique(np.linspace(0, last, POINTS).round().astype(np.int64)) if last >= 0 else ():
            threshold = float(policy.grid[index])
            found = band(table, table.outcome(table.first_decision(policy.test.scores, threshold)), seed)
            if found:
                yield {"policy": policy.name, "threshold": threshold, **found}


def since_rows(table: ReplayTable, outcome: Outcome, seed: int) -> Iterator[dict[str, Any]]:
    """Scores of the released requests with S > 0, by how many tokens the base wrote after the release, with bands."""
    alone = outcome.tokens - outcome.release
    place = np.digitize(alone, EDGES)
    for index in np.unique(place[outcome.released & table.solved]):
        mine = outcome.released & table.solved & (place == index)
        means = {"q_base": table.base_score, "q_adapter": table.score, "q_policy": outcome.score}
        row = {"tokens_from": int(alone[mine].min()), "tokens_to": int(alone[mine].max()), "n": int(mine.sum())}
        scores = {name: float(values[mine].mean()) for name, values in means.items()}
        yield {**row, **scores, **band(table, outcome, seed, mine)}


def band(table: ReplayTable, outcome: Outcome, seed: int, some: Bools | None = None) -> dict[str, float]:
    """Active-row share and kept score (R over S, and retention), each with the 5 % and 95 % quantile of resamples.

    The requests with S > 0, or `some` [n] of them, are drawn anew, together with all that happened to them; empty
    where there is none.
    """
    keep = table.solved if some is None else some
    if not keep.any():
        return {}
    s, b, r = table.score[keep], table.base_score[keep], outcome.score[keep]
    held, length = outcome.release[keep] - 1.0, table.length[keep] - 1.0
    n = len(s)
    counts = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), RESAMPLES)
    weights = np.vstack([np.ones(n), counts]).astype(np.float64)
    ratios = {
        "share": (weights @ held, weights @ length),
        "kept": (weights @ r, weights @ s),
        "retention": (weights @ (r - b), weights @ (s - b)),
    }
    return {key: value for name, pair in ratios.items() for key, value in _band(name, *pair).items()}


def _band(name: str, above: Floats, below: Floats) -> dict[str, float]:
    """Nothing for a ratio whose denominator may be 0: retention where the adapter gains nothing over the base."""
    if (below <= 0).any():
        return {}
    values = above / below
    low, high = np.quantile(values[1:], BAND)
    return {name: float(values[0]), f"{name}_low": float(low), f"{name}_high": float(high)}
