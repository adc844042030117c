"""How far the base's distribution lies from the adapter's, for pairs of rows: each logit read twice at most.

    for i, row in enumerate(rows):
        p, q = softmax(logits[row]), softmax(base_logits[base_rows[i]])
        out[row] = kl(p, q), js(p, q), p.argmax() == q.argmax(), q[token_ids[row]].log(), entropy(q)

Jensen-Shannon needs both normalisers first: it holds the logarithm of a sum of probabilities, which no running sum of
unnormalised terms gives. So the base's rows are summarised as the adapter's were (`summaries.py`, whose numbers of the
adapter's rows are used again), then one pass over both rows, in the same chunks, adds up the terms of KL and JS with
the normalisers that each program merges for itself, and a small program a pair adds the chunks in order.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# (Triton's device code is not typed Python.)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lorazor.kernels.signals import check_tokens, summary_of
from lorazor.kernels.summaries import (
    CHUNK,
    FIELDS,
    check_logits,
    check_rows,
    listed_row,
    load_chunk,
    load_field,
    load_logit,
    merge,
    result,
    row_entropy,
)

COLUMNS = 5
WARPS = 8  # two rows' logits in half as many registers a thread
# Probabilities below this have no part in JS: some devices flush them to zero on one side of a logarithm only.
TINY = tl.constexpr(1e-37)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["n_rows", "n_base"])
def _divergence_kernel(
    logits_ptr,
    base_ptr,
    summary_ptr,
    base_summary_ptr,
    rows_ptr,
    base_rows_ptr,
    terms_ptr,
    n_rows,
    n_base,
    vocab,
    stride,
    base_stride,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    FIELDS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_BASE_ROWS: tl.constexpr,
):
    """The terms of KL and of twice JS over one chunk of one pair."""
    i_chunk = tl.program_id(0) % CHUNKS
    i_pair = tl.program_id(0) // CHUNKS
    row = listed_row(rows_ptr, i_pair, n_rows, HAS_ROWS)
    base = listed_row(base_rows_ptr, i_pair, n_base, HAS_BASE_ROWS)
    if (row >= 0) & (base >= 0):
        _, b_x = load_chunk(logits_ptr, row, i_chunk, vocab, stride, CHUNK)
        _, b_y = load_chunk(base_ptr, base, i_chunk, vocab, base_stride, CHUNK)
        top, total, _, _ = merge(summary_ptr, row, CHUNKS, PADDED, FIELDS)
        base_top, base_total, _, _ = merge(base_summary_ptr, base, CHUNKS, PADDED, FIELDS)
        b_log_p = (b_x - top) - tl.log(total)
        b_log_q = (b_y - base_top) - tl.log(base_total)
        b_p = tl.exp(b_log_p)
        b_q = tl.exp(b_log_q)
        b_log_m = tl.log(b_p + b_q) - LN2
        b_kl = tl.where(b_p > 0.0, b_p * (b_log_p - b_log_q), 0.0)
        b_js = tl.where(b_p > TINY, b_p * (b_log_p - b_log_m), 0.0)
        b_js += tl.where(b_q > TINY, b_q * (b_log_q - b_log_m), 0.0)
        p_terms = terms_ptr + i_pair.to(tl.int64) * 2 * CHUNKS + i_chunk
        tl.store(p_terms, tl.sum(b_kl))
        tl.store(p_terms + CHUNKS, tl.sum(b_js))


@triton.jit(do_not_specialize=["n_rows", "n_base"])
def _probe_kernel(
    terms_ptr,
    summary_ptr,
    base_summary_ptr,
    base_ptr,
    tokens_ptr,
    rows_ptr,
    base_rows_ptr,
    out_ptr,
    n_rows,
    n_base,
    vocab,
    base_stride,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    FIELDS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_BASE_ROWS: tl.constexpr,
):
    """Merge the chunks of one pair."""
    i_pair = tl.program_id(0)
    row = listed_row(rows_ptr, i_pair, n_rows, HAS_ROWS)
    base = listed_row(base_rows_ptr, i_pair, n_base, HAS_BASE_ROWS)
    if (row >= 0) & (base >= 0):
        o_chunk = tl.arange(0, PADDED)
        p_terms = terms_ptr + i_pair.to(tl.int64) * 2 * CHUNKS + o_chunk
        kl = tl.maximum(tl.sum(tl.load(p_terms, mask=o_chunk < CHUNKS, other=0.0)), 0.0)
        js = 0.5 * tl.sum(tl.load(p_terms + CHUNKS, mask=o_chunk < CHUNKS, other=0.0))
        js = tl.minimum(tl.maximum(js, 0.0), LN2)
        top, total, b_top, _ = merge(summary_ptr, row, CHUNKS, PADDED, FIELDS)
        base_top, base_total, b_base_top, b_scale = merge(base_summary_ptr, base, CHUNKS, PADDED, FIELDS)
        entropy = row_entropy(base_summary_ptr, base, base_top, base_total, b_base_top, b_scale, CHUNKS, PADDED, FIELDS)
        b_place = load_field(summary_ptr, row, 4, 0.0, CHUNKS, PADDED, FIELDS)
        b_base_place = load_field(base_summary_ptr, base, 4, 0.0, CHUNKS, PADDED, FIELDS)
        none = 1e9  # the lowest id of the chunks that have the top
        place = tl.min(tl.where(b_top == top, b_place, none))
        base_place = tl.min(tl.where(b_base_top == base_top, b_base_place, none))
        y = load_logit(base_ptr, base, tl.load(tokens_ptr + row), vocab, base_stride)
        missing = float("nan")
        defined = (total > 0.0) & (base_total > 0.0)
        p_out = out_ptr + row.to(tl.int64) * 5
        tl.store(p_out, tl.where(defined, kl, missing))
        tl.store(p_out + 1, tl.where(defined, js, missing))
        tl.store(p_out + 2, tl.where(defined, (place == base_place).to(tl.float32), missing))
        tl.store(p_out + 3, tl.where(defined, (y - base_top) - tl.log(base_total), missing))
        tl.store(p_out + 4, tl.where(defined, entropy, missing))


def probe_signals(
    logits: torch.Tensor,
    base_logits: torch.Tensor,
    token_ids: torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
    base_rows: torch.Tensor | None = None,
    summary: torch.Tensor | None = None,
    base_summary: torch.Tensor | None = None,
    terms: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """KL, JS, same argmax, ln q[token] and entropy of q for the listed rows, float32 [n, 5]; no other is written.

    Args:
        logits: the adapter's [n, V]. base_logits: the base's [m, V], of any of the dtypes too; both may be one tensor.
        token_ids: int32 or int64 [n], the token chosen in each of the adapter's rows.
        rows: int32 [k], the adapter's row of each pair, on the device; -1 stands for no pair. None: all rows.
        base_rows: int32 [k], the base's row of each pair; None: the pair's own place in the list.
        summary, base_summary: what `summarise` gave for these logits (their listed rows), if it ran already.
        terms: float32 [k, 2, chunks], memory for what is in between. out: memory for the result.

    Raises:
        ValueError: a shape, stride or dtype does not fit.
    """
    check_pairs(logits, base_logits, rows, base_rows)
    check_tokens(token_ids, logits.shape[0])
    out = result(out, (logits.shape[0], COLUMNS), logits.device)
    n = logits.shape[0] if rows is None else rows.shape[0]
    if not n:
        return out
    summary = summary_of(logits, rows, summary)
    base_summary = summary_of(base_logits, base_rows, base_summary)
    chunks = summary.shape[2]
    shared = {
        "summary_ptr": summary,
        "base_summary_ptr": base_summary,
        "base_ptr": base_logits,
        "rows_ptr": token_ids if rows is None else rows,
        "base_rows_ptr": token_ids if base_rows is None else base_rows,
        "terms_ptr": result(terms, (n, 2, chunks), logits.device),
        "n_rows": logits.shape[0],
        "n_base": base_logits.shape[0],
        "vocab": logits.shape[1],
        "base_stride": base_logits.stride(0),
        "CHUNKS": chunks,
        "PADDED": triton.next_power_of_2(chunks),
        "FIELDS": FIELDS,
        "HAS_ROWS": rows is not None,
        "HAS_BASE_ROWS": base_rows is not None,
    }
    _divergence_kernel[(n * chunks,)](
        logits_ptr=logits, stride=logits.stride(0), CHUNK=CHUNK, num_warps=WARPS, **shared
    )
    _probe_kernel[(n,)](tokens_ptr=token_ids, out_ptr=out, num_warps=1, **shared)
    return out


def check_pairs(
    logits: torch.Tensor, base_logits: torch.Tensor, rows: torch.Tensor | None, base_rows: torch.Tensor | None
) -> None:
    """Raises ValueError if these are not two sets of logits over one vocabulary, paired one to one."""
    for some_logits, some_rows in ((logits, rows), (base_logits, base_rows)):
        check_logits(some_logits)
        check_rows(some_rows)
    if logits.shape[1] != base_logits.shape[1]:
        raise ValueError(f"both must have one vocabulary, found {logits.shape[1]} and {base_logits.shape[1]} tokens")
    pairs, base_pairs = (
        some_logits.shape[0] if some_rows is None else some_rows.shape[0]
        for some_logits, some_rows in ((logits, rows), (base_logits, base_rows))
    )
    if base_pairs < pairs:
        raise ValueError(f"{pairs} pairs need as many of the base's rows, found {base_pairs}")
