"""What is known of each row's softmax after one pass over the logits, in a few numbers a chunk.

    for row in rows:
        for c, x in enumerate(chunks of logits[row], CHUNK tokens each):
            top = x.max()
            d = x - top
            summary[row, :, c] = top, d.exp().sum(), (d * d.exp()).sum(), second, place

`second` is the largest value once one place of the top is set aside (so it equals the top in a tie); `place` is the
lowest id that has the top, as a float (exact to 2^24). Summaries of chunks merge exactly like those of single tokens;
a row's entropy is then ln Σ e^d - Σ d e^d / Σ e^d, two terms of one sign, so nothing cancels.

Every chunk is one program and every number is written once: no atomics, and the bits of a row depend on its own logits
and on the size of the vocabulary alone. A NaN or +inf, or nothing but -inf, makes a row's merged sum NaN; so a row has
a distribution if and only if its sum is above 0.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# (Triton's device code is not typed Python.)

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Tokens of one program: 32 float32 a thread, few enough that five or more programs share a multiprocessor and keep some
# 40 KB of loads under way, which is what hides the memory's latency; 128,256 tokens make 32 programs with 2 % to spare.
CHUNK = 4096
WARPS = 4
FIELDS = 5
MOST_TOKENS = 1 << 24
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Stands for -inf in products with 0; what is multiplied with it is below 2^24, so it stays finite.
FLOOR = tl.constexpr(-1e30)


@triton.jit
def listed_row(rows_ptr, i, n_rows, HAS_ROWS: tl.constexpr):
    """The i-th listed row, or -1 if that place of the list is empty (or names no row)."""
    row = i
    if HAS_ROWS:
        row = tl.load(rows_ptr + i)
        row = tl.where(row < n_rows, row, -1)
    return row


@triton.jit
def load_chunk(logits_ptr, row, i_chunk, vocab, stride, CHUNK: tl.constexpr):
    """The token ids of a chunk and their logits as float32; -inf, the logit of no token, past the vocabulary."""
    o_token = i_chunk * CHUNK + tl.arange(0, CHUNK)
    p_logit = logits_ptr + row.to(tl.int64) * stride + o_token
    return o_token, tl.load(p_logit, mask=o_token < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def load_logit(logits_ptr, row, token, vocab, stride):
    """The logit of one token as float32, NaN if there is no such token."""
    known = (token >= 0) & (token < vocab)
    p_logit = logits_ptr + row.to(tl.int64) * stride + tl.where(known, token, 0)
    return tl.where(known, tl.load(p_logit).to(tl.float32), float("nan"))


@triton.jit
def load_field(summary_ptr, row, i_field, empty, CHUNKS: tl.constexpr, PADDED: tl.constexpr, FIELDS: tl.constexpr):
    """One field of all chunks of a row."""
    o_chunk = tl.arange(0, PADDED)
    p_field = summary_ptr + (row.to(tl.int64) * FIELDS + i_field) * CHUNKS
    return tl.load(p_field + o_chunk, mask=o_chunk < CHUNKS, other=empty)


@triton.jit
def merge(summary_ptr, row, CHUNKS: tl.constexpr, PADDED: tl.constexpr, FIELDS: tl.constexpr):
    """A row's top, its sum Σ e^(x - top), and the chunks' tops and scales e^(chunk's top - top)."""
    b_top = load_field(summary_ptr, row, 0, float("-inf"), CHUNKS, PADDED, FIELDS)
    b_sum = load_field(summary_ptr, row, 1, 0.0, CHUNKS, PADDED, FIELDS)
    top = tl.max(b_top)
    b_scale = tl.exp(b_top - top)  # NaN if no chunk has a top
    return top, tl.sum(b_scale * b_sum), b_top, b_scale


@triton.jit
def row_entropy(
    summary_ptr, row, top, total, b_top, b_scale, CHUNKS: tl.constexpr, PADDED: tl.constexpr, FIELDS: tl.constexpr
):
    """-Σ p ln p from what `merge` gave."""
    b_sum = load_field(summary_ptr, row, 1, 0.0, CHUNKS, PADDED, FIELDS)
    b_weighted = load_field(summary_ptr, row, 2, 0.0, CHUNKS, PADDED, FIELDS)
    weighted = tl.sum(b_scale * (b_weighted + b_sum * tl.maximum(b_top - top, FLOOR)))
    return tl.maximum(tl.log(total) - weighted / total, 0.0) + 0.0


@triton.jit(do_not_specialize=["n_rows"])
def _summary_kernel(
    logits_ptr,
    rows_ptr,
    summary_ptr,
    n_rows,
    vocab,
    stride,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    FIELDS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
):
    """One chunk of one listed row; neighbours in memory are neighbours in the grid."""
    i_chunk = tl.program_id(0) % CHUNKS
    row = listed_row(rows_ptr, tl.program_id(0) // CHUNKS, n_rows, HAS_ROWS)
    if row >= 0:
        o_token, b_x = load_chunk(logits_ptr, row, i_chunk, vocab, stride, CHUNK)
        top = tl.max(b_x)
        b_d = b_x - tl.where(top == float("-inf"), 0.0, top)  # NaN for NaN and for +inf, whatever the maximum does
        b_e = tl.exp(b_d)
        place = tl.min(tl.where(b_x == top, o_token, 1 << 24))
        second = tl.max(tl.where(o_token == place, float("-inf"), b_x))
        p_out = summary_ptr + row.to(tl.int64) * FIELDS * CHUNKS + i_chunk
        tl.store(p_out, top)
        tl.store(p_out + CHUNKS, tl.sum(b_e))
        tl.store(p_out + 2 * CHUNKS, tl.sum(tl.maximum(b_d, FLOOR) * b_e))
        tl.store(p_out + 3 * CHUNKS, second)
        tl.store(p_out + 4 * CHUNKS, place.to(tl.float32))


def summarise(
    logits: torch.Tensor, *, rows: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The summary of each listed row, float32 [n, FIELDS, chunks]; other rows' cells are not written.

    Args:
        logits: [n, V], the last dimension dense; float32, bfloat16 or float16.
        rows: int32 [k], the rows to do, on the device; -1 stands for none. None: all rows.
        out: memory for the result.

    Raises:
        ValueError: a shape, stride or dtype does not fit.
    """
    check_logits(logits)
    check_rows(rows)
    n_rows, vocab = logits.shape
    out = result(out, summary_shape(logits), logits.device)
    chunks = out.shape[2]
    n = n_rows if rows is None else rows.shape[0]
    if n:
        _summary_kernel[(n * chunks,)](
            logits_ptr=logits,
            rows_ptr=out if rows is None else rows,
            summary_ptr=out,
            n_rows=n_rows,
            vocab=vocab,
            stride=logits.stride(0),
            CHUNKS=chunks,
            CHUNK=CHUNK,
            FIELDS=FIELDS,
            HAS_ROWS=rows is not None,
            num_warps=WARPS,
        )
    return out


def summary_shape(logits: torch.Tensor) -> tuple[int, int, int]:
    """[n, FIELDS, chunks]."""
    return logits.shape[0], FIELDS, triton.cdiv(logits.shape[1], CHUNK)


def check_logits(logits: torch.Tensor) -> None:
    """Raises ValueError if these are not logits that the kernels read."""
    if logits.dtype not in DTYPES:
        raise ValueError(f"logits must be float32, bfloat16 or float16, are {logits.dtype}")
    if logits.ndim != 2 or logits.stride(1) != 1 or not 0 < logits.shape[1] <= MOST_TOKENS:
        raise ValueError(f"logits must be dense [n, 1 to {MOST_TOKENS}], are {tuple(logits.shape)}")


def check_rows(rows: torch.Tensor | None) -> None:
    """Raises ValueError if this is not a list of rows."""
    if rows is not None and (rows.dtype != torch.int32 or rows.ndim != 1 or not rows.is_contiguous()):
        raise ValueError(f"rows must be contiguous int32 [k], are {rows.dtype} {tuple(rows.shape)}")


def result(out: torch.Tensor | None, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """`out` if it fits, else new float32 memory if there is none. Raises ValueError if it does not fit."""
    if out is None:
        return torch.empty(shape, dtype=torch.float32, device=device)
    if out.shape != shape or out.dtype != torch.float32 or not out.is_contiguous():
        raise ValueError(f"out must be contiguous float32 {shape}, is {out.dtype} {tuple(out.shape)}")
    return out
