"""What the policy learns: whether releasing at a decision is safe, and how much each decision counts in learning it."""

from __future__ import annotations

import numpy as np

from lorazor.training.replay import Bools, Floats, ReplayTable

LEAST = 0.05
"""Added to the share that a release saves, so that the last decisions count for something."""
UNSOLVED = 0.3
"""What a decision counts where S = 0, against one where S > 0: it can neither save nor cost anything that is judged."""


def safe(table: ReplayTable) -> Bools:
    """[D] design.md's label: R >= S where S > 0, and equal text where S = 0.

    A request that its adapter fails anyway must not look like a saving, hence the second half.
    """
    never_released = table.score[table.request]
    at_least = table.released_score >= never_released
    return np.where(never_released > 0, at_least, table.same_text)


def weight(table: ReplayTable) -> Floats:
    """[D] what each decision counts in learning, above 0: the share of the request's decode steps that it would save.

    It does not depend on the label, so that scores stay estimates of how often a release is safe.
    """
    length, solved = table.length[table.request], table.solved[table.request]
    left = np.clip((length - table.release) / np.maximum(1, length - 1), 0, 1)
    return np.where(solved, left + LEAST, UNSOLVED * (left + LEAST))
