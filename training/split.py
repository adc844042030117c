"""Train, validation and test parts: split by request, never by step, and each task alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from lorazor.features.errors import InputError
from lorazor.policy.rule import in_fraction

MIN_REQUESTS = 10
"""Fewer requests of a task than this cannot be split into three parts that say anything."""


@dataclass(frozen=True)
class Split:
    """Request ids of the three parts."""

    train: frozenset[str]
    validation: frozenset[str]
    test: frozenset[str]

    @property
    def everyone(self) -> frozenset[str]:
        """The ids of all parts."""
        return self.train | self.validation | self.test


def without(request_ids: Iterable[str], share: float, *, seed: int) -> list[str]:
    """The ids but for about this share of them, the same ones however many others there are.

    Raises:
        InputError: the share is not in [0, 1).
    """
    if not 0 <= share < 1:
        raise InputError(f"the share of requests to leave out must be at least 0 and below 1, got {share:g}")
    return [i for i in request_ids if not in_fraction(f"{seed}/{i}", share)]


def split_requests(requests: pd.DataFrame, *, seed: int, validation: float = 0.2, test: float = 0.2) -> Split:
    """Split `TraceSet.requests` by request id, each task in the same shares; the rest is for training.

    The split depends on the set of ids and the seed, not on the order of the rows.
    """
    from sklearn.model_selection import train_test_split

    if not (0 < validation < 1 and 0 < test < 1 and validation + test < 1):
        raise InputError(
            f"the shares for validation ({validation}) and test ({test}) must be above 0 and sum to below 1"
        )
    counts = requests["task"].value_counts()
    if (few := counts[counts < MIN_REQUESTS]).size:
        raise InputError(f"task {few.index[0]!r} has {few.iloc[0]} requests; training needs at least {MIN_REQUESTS}")
    ordered = requests.sort_values("request_id")
    ids, task = ordered["request_id"].to_numpy(dtype=object), ordered["task"].to_numpy(dtype=object)
    rest, tested = train_test_split(np.arange(len(ids)), test_size=test, stratify=task, random_state=seed)
    share = validation / (1 - test)
    trained, validated = train_test_split(rest, test_size=share, stratify=task[rest], random_state=seed)
    return Split(*(frozenset(ids[part].tolist()) for part in (trained, validated, tested)))
