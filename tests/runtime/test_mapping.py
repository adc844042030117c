"""The boundary rule over a batch, against the rule written as a loop."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lorazor.runtime.mapping import map_tokens

rows = st.lists(
    st.tuples(st.integers(0, 5), st.one_of(st.none(), st.integers(1, 60)), st.integers(0, 50), st.integers(1, 20)),
    min_size=1,
    max_size=12,
)


@given(rows)
def test_the_mapping_is_the_rule(batch: list[tuple[int, int | None, int, int]]) -> None:
    """Every token, every sampled row and every count, for any mix of rows, boundaries and chunks."""
    adapters, bounds, start, counts = (list(column) for column in zip(*batch, strict=True))
    per_token: list[int] = []
    per_row: list[int] = []
    active: list[int] = []
    for adapter, bound, first, count in batch:
        uses = [adapter if bound is None or p < bound else 0 for p in range(first, first + count)]
        per_token += uses
        per_row.append(uses[-1])
        active.append(sum(use > 0 for use in uses))
    got = map_tokens(np.array(adapters), bounds, np.array(start), np.array(counts))
    assert got.per_token.tolist() == per_token
    assert got.per_row.tolist() == per_row
    assert got.active.tolist() == active
