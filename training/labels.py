"""What the policy learns: whether releasing at a decision is safe."""

from __future__ import annotations

import numpy as np

from lorazor.training.replay import Bools, ReplayTable


def safe(table: ReplayTable) -> Bools:
    """[D] design.md's label: R >= S where S > 0, and equal text where S = 0.

    A request that its adapter fails anyway must not look like a saving, hence the second half.
    """
    never_released = table.score[table.request]
    at_least = table.released_score >= never_released
    return np.where(never_released > 0, at_least, table.same_text)
