"""Rows taken out of a batch: what is left is the batch that would have been without them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lorazor.runtime.batch_rows import PER_ROW, drop_rows, rows_last


def batch(lengths: list[int], padding: int = 0) -> Any:
    """What `drop_rows` changes of vLLM's InputBatch, for rows of these many tokens; `padding` as for a full graph."""
    n, starts = len(lengths), np.cumsum([0, *lengths]).astype(np.int32)
    ids = np.array(lengths, np.int32) * 10
    padded = np.concatenate([starts, np.full(padding, starts[-1], np.int32)])
    made = SimpleNamespace(
        req_ids=[str(k) for k in lengths],
        num_reqs=n,
        num_reqs_after_padding=n + padding,
        query_start_loc=torch.from_numpy(padded),
        query_start_loc_np=padded.copy(),
        logits_indices=torch.from_numpy(starts[1:] - 1),
        expanded_local_pos=torch.zeros(n),
        cu_num_logits=torch.arange(n + 1),
        cu_num_logits_np=np.arange(n + 1),
    )
    for name in PER_ROW:
        setattr(made, name, ids.copy() if name.endswith("_np") or name == "num_scheduled_tokens" else torch.tensor(ids))
    made.seq_lens = torch.cat([made.seq_lens, torch.zeros(padding, dtype=torch.int32)])
    made.expanded_idx_mapping = made.idx_mapping
    return made


@given(st.integers(1, 5), st.integers(1, 4), st.lists(st.integers(2, 9), max_size=3), st.integers(0, 3))
def test_the_rest_is_as_without_them(before: int, count: int, longer: list[int], padding: int) -> None:
    """Rows of one token, the dropped ones behind the others, then longer ones or padding."""
    made = batch([1] * (before + count) + longer, 0 if longer else padding)
    dropped = range(before, before + count)
    drop_rows(made, dropped)
    wanted = batch([1] * before + longer)
    # The tokens stay where they are, and the dropped rows' are behind them.
    ends = np.cumsum([1] * (before + count) + longer, dtype=np.int32) - 1
    wanted.logits_indices = torch.from_numpy(
        np.r_[ends[:before], ends[before + count :], ends[before : before + count]]
    )
    for name, value in vars(wanted).items():
        got = getattr(made, name)
        if isinstance(value, np.ndarray | torch.Tensor):
            np.testing.assert_array_equal(np.asarray(got), np.asarray(value), err_msg=name)
            assert got.dtype == value.dtype
        else:
            assert got == value, name


@pytest.mark.parametrize(
    ("rows", "wanted"), [(range(1, 3), [0, 3, 4, 1, 2]), (range(3, 5), [0, 1, 2, 3, 4]), (range(2, 2), [0, 1, 2, 3, 4])]
)
def test_rows_last(rows: range, wanted: list[int]) -> None:
    """In order; nothing is copied where nothing moves."""
    for values in (np.arange(5), torch.arange(5)):
        assert rows_last(values, rows).tolist() == wanted
        assert (rows_last(values, rows) is values) == (wanted == [0, 1, 2, 3, 4])
