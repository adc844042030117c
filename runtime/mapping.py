"""The boundary rule over one step's batch: which adapter each scheduled token and each sampled row uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class TokenMapping(NamedTuple):
    """Adapter ids, 0 = none: of every scheduled token [sum of counts], of every row's last token [n], and the number
    of each row's tokens that use its adapter [n]."""

    per_token: Ints
    per_row: Ints
    active: Ints


def map_tokens(adapters: Ints, boundaries: Sequence[int | None], start: Ints, counts: Ints) -> TokenMapping:
    """Apply the rule to each row's tokens: a token at position p uses the row's adapter if and only if p < boundary.

    for row, (adapter, boundary) in enumerate(zip(adapters, boundaries)):
        for p in range(start[row], start[row] + counts[row]):
            per_token += [adapter if boundary is None or p < boundary else 0]

    Args:
        adapters: each row's adapter id, 0 = it has none [n].
        boundaries: None = not released [n].
        start: the position of each row's first token in this step [n].
        counts: tokens of each row in this step [n], at least 1.
    """
    bounds = np.array([np.iinfo(np.int64).max if b is None else b for b in boundaries], np.int64)
    active = np.where(adapters > 0, np.clip(bounds - start, 0, counts), 0)
    pairs = np.stack([adapters, np.zeros_like(adapters)], axis=1)
    lengths = np.stack([active, counts - active], axis=1)
    per_token = np.repeat(pairs.ravel(), lengths.ravel())
    return TokenMapping(per_token, np.where(active == counts, adapters, 0), active)
