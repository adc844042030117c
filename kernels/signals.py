"""Signals of the next-token distributions: `features/signals.py` on the GPU, each logit read once.

    for row in rows:
        p = softmax(logits[row])
        out[row] = entropy(p), p1, p1 - p2, p[token_ids[row]].log()

Two launches: the pass over the logits (`summaries.py`: every listed row in chunks, all of them at once, so that even a
few rows fill the device) and one small program a row that merges its chunks. The pass needs no token, so it can run
before the sampler, which may write into the logits, and the merge after it. `probe_signals.py` compares two rows.

The columns and their edge cases are those of `features.signals`; sums are float32. Neither launch uses programmatic
dependent launch: what runs around the logits does not either, and the kernels' order then needs no care.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# (Triton's device code is not typed Python.)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lorazor.kernels.summaries import (
    FIELDS,
    check_logits,
    check_rows,
    listed_row,
    load_field,
    load_logit,
    merge,
    result,
    row_entropy,
    summarise,
    summary_shape,
)

COLUMNS = 4


@triton.jit(do_not_specialize=["n_rows"])
def _adapter_kernel(
    summary_ptr,
    logits_ptr,
    tokens_ptr,
    rows_ptr,
    out_ptr,
    n_rows,
    vocab,
    stride,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    FIELDS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
):
    """Merge the chunks of one listed row."""
    row = listed_row(rows_ptr, tl.program_id(0), n_rows, HAS_ROWS)
    if row >= 0:
        top, total, b_top, b_scale = merge(summary_ptr, row, CHUNKS, PADDED, FIELDS)
        entropy = row_entropy(summary_ptr, row, top, total, b_top, b_scale, CHUNKS, PADDED, FIELDS)
        b_second = load_field(summary_ptr, row, 3, float("-inf"), CHUNKS, PADDED, FIELDS)
        # The second is in the top's own chunk or tops another one; two chunks with the same top are a tie.
        ties = tl.sum((b_top == top).to(tl.int32))
        second = tl.maximum(tl.max(b_second), tl.max(tl.where(b_top == top, float("-inf"), b_top)))
        second = tl.where(ties > 1, top, second)
        x = load_logit(logits_ptr, row, tl.load(tokens_ptr + row), vocab, stride)
        missing = float("nan")
        defined = total > 0.0
        p_out = out_ptr + row.to(tl.int64) * 4
        tl.store(p_out, tl.where(defined, entropy, missing))
        tl.store(p_out + 1, tl.where(defined, 1.0 / total, missing))
        tl.store(p_out + 2, tl.where(defined, (1.0 - tl.exp(second - top)) / total, missing))
        tl.store(p_out + 3, tl.where(defined, (x - top) - tl.log(total), missing))


def adapter_signals(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
    summary: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Entropy, p1, p1 - p2 and ln p[token] of the listed rows, float32 [n, 4]; other rows are not written.

    Args:
        logits: [n, V], the last dimension dense; float32, bfloat16 or float16.
        token_ids: int32 or int64 [n], the token chosen in each row.
        rows: int32 [k], the rows to do, on the device; -1 stands for none. None: all rows.
        summary: what `summarise` gave for these logits, if it ran already; then only the chosen tokens' logits are
            read here, which must still be the raw ones.
        out: memory for the result.

    Raises:
        ValueError: a shape, stride or dtype does not fit.
    """
    check_logits(logits)
    check_rows(rows)
    n_rows, vocab = logits.shape
    check_tokens(token_ids, n_rows)
    out = result(out, (n_rows, COLUMNS), logits.device)
    summary = summary_of(logits, rows, summary)
    n = n_rows if rows is None else rows.shape[0]
    if n:
        _adapter_kernel[(n,)](
            summary_ptr=summary,
            logits_ptr=logits,
            tokens_ptr=token_ids,
            rows_ptr=token_ids if rows is None else rows,
            out_ptr=out,
            n_rows=n_rows,
            vocab=vocab,
            stride=logits.stride(0),
            CHUNKS=summary.shape[2],
            PADDED=triton.next_power_of_2(summary.shape[2]),
            FIELDS=FIELDS,
            HAS_ROWS=rows is not None,
            num_warps=1,
        )
    return out


def summary_of(logits: torch.Tensor, rows: torch.Tensor | None, summary: torch.Tensor | None) -> torch.Tensor:
    """The summary that was given, checked, or a new one. Raises ValueError if it is of other logits."""
    return summarise(logits, rows=rows) if summary is None else result(summary, summary_shape(logits), logits.device)


def check_tokens(token_ids: torch.Tensor, n_rows: int) -> None:
    """Raises ValueError if these are not the tokens of n rows."""
    if token_ids.dtype not in (torch.int32, torch.int64) or token_ids.shape != (n_rows,) or token_ids.stride(0) != 1:
        raise ValueError(
            f"token_ids must be dense int32 or int64 [{n_rows}], are {token_ids.dtype} {tuple(token_ids.shape)}"
        )
