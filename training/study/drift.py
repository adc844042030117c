"""What drift does to a promise: thresholds calibrated on the shorter half of requests, served the longer half."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from lorazor.training.calibration import Scored
from lorazor.training.losses import observed
from lorazor.training.replay import Bools, Ints, active_row_share, drop
from lorazor.training.study.cells import Parts, Rated
from lorazor.training.study.layout import CALIBRATE, TEST
from lorazor.training.study.numbers import above
from lorazor.training.study.policies import Promise, choose

Row = dict[str, Any]


def drift_rows(parts: Parts, policy: Rated, promise: Promise) -> Iterator[Row]:
    """Calibrated on the shorter half: the test drop on short requests, as promised, and on long ones, as not.

    `by` says what is short: the prompt, which a server can see, or the never-released output, which it cannot.
    """
    for by in ("prompt tokens", "output tokens"):
        sizes = {part: _sizes(parts, part, by) for part in (CALIBRATE, TEST)}
        middle = float(np.median(sizes[CALIBRATE]))
        short = _where(policy.calibrate, sizes[CALIBRATE] <= middle)
        served = {"short": sizes[TEST] <= middle, "long": sizes[TEST] > middle}
        for kind, max_drop in promise.limits:
            threshold, _ = choose(policy.name, short, policy.grid, kind, max_drop, promise.confidence)
            asked = {"loss_kind": kind, "max_drop": max_drop, "threshold": threshold}
            for name, keep in served.items():
                head = {"by": by, "cut": middle, **asked, "served": name}
                if keep.any():
                    found = _served(_where(policy.test, keep), threshold, max_drop)
                    yield {**head, "n_calibrate": len(short.table), **found}


def _served(scored: Scored, threshold: float | None, max_drop: float) -> Row:
    """What a server could watch stands beside the truth: how many requests release, and their mean score."""
    table = scored.table
    outcome = table.outcome(table.first_decision(scored.scores, threshold))
    return {
        **{"n": len(table), "drop": drop(table, outcome), "loss": observed("relative", table.score, outcome.score)},
        **{"active_row_share": active_row_share(table, outcome), "released": float(outcome.released.mean())},
        **{"mean_score": float(np.nanmean(scored.scores)) if len(scored.scores) else None},
        **above(table, outcome, max_drop),
    }


def _where(scored: Scored, keep: Bools) -> Scored:
    return Scored(scored.table.subset(keep), scored.scores[keep[scored.table.request]])


def _sizes(parts: Parts, part: str, by: str) -> Ints:
    column = "prompt_tokens" if by == "prompt tokens" else "length"
    return parts.traces[part].requests[column].to_numpy(np.int64)
