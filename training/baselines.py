"""Every release policy as one thing, a score per decision and a threshold, so that one code path compares them all.

The scores of the simple policies are ordered so that a higher threshold always means a later release.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lorazor.features.schema import FEATURES
from lorazor.training.labels import safe
from lorazor.training.replay import Floats, ReplayTable

Score = Callable[[ReplayTable], Floats]


@dataclass(frozen=True)
class ReleasePolicy:
    """A named score: `score(table)` gives float64 [D]; NaN never releases.

    `shared`: one threshold must serve all tasks (else each task has its own). `refit()`: the score of the same policy
    fitted on all requests, for requests that are none of them; None where nothing is fitted.
    """

    name: str
    score: Score
    shared: bool = False
    refit: Callable[[], Score] | None = None


def simple_policies(seed: int, mean_output_tokens: dict[str, float]) -> list[ReleasePolicy]:
    """The policies that learn nothing but their threshold."""
    return [
        ReleasePolicy("fixed step", lambda table: table.release.astype(np.float64)),
        ReleasePolicy("fixed fraction", lambda table: table.release / mean_output_tokens[table.task], shared=True),
        ReleasePolicy("random", lambda table: _random(table, seed)),
        ReleasePolicy("entropy", lambda table: -feature(table, "entropy")),
        ReleasePolicy("margin", lambda table: feature(table, "margin")),
        ReleasePolicy("KL", lambda table: -feature(table, "kl")),
    ]


ORACLE = ReleasePolicy("oracle", lambda table: np.where(safe(table), 1.0, np.nan))
"""The earliest safe release of every request, by hindsight; its only threshold is 1."""


def feature(table: ReplayTable, name: str) -> Floats:
    """One column of the features, float64 [D]."""
    return table.features[:, FEATURES.index(name)].astype(np.float64)


def _random(table: ReplayTable, seed: int) -> Floats:
    """Uniform in [0, 1) per decision, so that a threshold of 1 - p releases with probability p at every decision.

    Each request's numbers come from a hash of its id: they do not change with the requests beside it.
    """
    counts = np.diff(table.first)
    drawn = [_uniform(str(request), seed, int(n)) for request, n in zip(table.request_id, counts, strict=True)]
    return np.concatenate([*drawn, np.empty(0)])


def _uniform(request_id: str, seed: int, n: int) -> Floats:
    digest = hashlib.sha256(f"{seed}/{request_id}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "big"))).random(n)
