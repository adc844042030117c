"""Rows taken out of vLLM's batch of a step, and put last: on the host and on the device, without waiting for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

# Of vLLM's InputBatch: one value a row.
PER_ROW = (
    "idx_mapping",
    "idx_mapping_np",
    "num_scheduled_tokens",
    "seq_lens",
    "num_computed_tokens_np",
    "prefill_len_np",
    "num_computed_prefill_tokens_np",
    "is_prefilling_np",
)


def drop_rows(batch: Any, rows: range) -> None:
    """Take these rows, of one token each, out of an InputBatch, in place: vLLM goes on with the object that it has.

    Tokens stay: `positions` and `input_ids` are as they were. `logits_indices` is still of all rows, these last, so
    that the caller gets their logits too; cut it to `num_reqs` after that.
    """
    n, left, start, stop = batch.num_reqs, batch.num_reqs - len(rows), rows.start, rows.stop
    batch.req_ids = batch.req_ids[:start] + batch.req_ids[stop:]
    batch.num_reqs = batch.num_reqs_after_padding = left
    for name in PER_ROW:
        values = getattr(batch, name)
        setattr(batch, name, _joined(values[:start], values[stop:n]))
    for name in ("query_start_loc", "query_start_loc_np"):
        values = getattr(batch, name)
        setattr(batch, name, _joined(values[: start + 1], values[stop + 1 : n + 1] - len(rows)))
    batch.logits_indices = rows_last(batch.logits_indices, rows)
    # These two differ from `idx_mapping` and zeros in speculative decoding alone.
    batch.expanded_idx_mapping = batch.idx_mapping
    batch.expanded_local_pos = batch.expanded_local_pos[:left]
    batch.cu_num_logits = batch.cu_num_logits[: left + 1]
    batch.cu_num_logits_np = batch.cu_num_logits_np[: left + 1]


def rows_last(values: Any, rows: range) -> Any:
    """The values [n, ...] with those of `rows` behind all others."""
    if not rows or rows.stop == len(values):
        return values
    return _joined(_joined(values[: rows.start], values[rows.stop :]), values[rows.start : rows.stop])


def _joined(head: Any, tail: Any) -> Any:
    """Both, one after the other: arrays or tensors; `head` itself, uncopied, where nothing follows."""
    if not len(tail):
        return head
    return torch.cat([head, tail]) if isinstance(head, torch.Tensor) else np.concatenate([head, tail])
