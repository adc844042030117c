"""One operating point as numbers of a row: those of `Summary`, and what a promise is held to."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import stats

from lorazor.training.losses import observed
from lorazor.training.replay import Floats, Outcome, ReplayTable, summarize

ALL, SOLVED = "all", "S > 0"
SCOPES = (ALL, SOLVED)


def prompt_only(table: ReplayTable) -> Outcome:
    """Every request released at admission: r = 1."""
    return table.outcome(table.first_decision(np.where(table.step == 0, 0.0, np.nan), 0.0))


def numbers(table: ReplayTable, outcome: Outcome, scope: str) -> dict[str, Any]:
    """Summary, `loss` (what max-drop limits, as seen), and requests that lost score; empty without any request."""
    solved = scope == SOLVED
    keep = table.solved if solved else np.ones(len(table), dtype=np.bool_)
    if not keep.any():
        return {}
    s, r = table.score[keep], outcome.score[keep]
    summary = summarize(table, outcome, solved_only=solved).to_dict()
    return {**summary, "loss": observed("relative", s, r), "harmed": int((r < s).sum())}


def above(table: ReplayTable, outcome: Outcome, max_drop: float) -> dict[str, float]:
    """One-sided p-values of "at most max_drop" on these requests, for the drop and for the loss that was bounded."""
    s, r = table.score, outcome.score
    return {
        "p_drop_above": _p_above(s - r - max_drop * s),
        "p_loss_above": _p_above(np.maximum(0, s - r) - max_drop * s),
    }


def _p_above(excess: Floats) -> float:
    """H0: the mean is at most 0; values that are all alike leave no doubt either way."""
    if len(excess) < 2 or excess.std() == 0:
        return float(excess.mean() <= 0)
    return float(stats.ttest_1samp(excess, 0, alternative="greater").pvalue)
