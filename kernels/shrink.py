"""Shrink: project the active rows down to the rank, as partial sums over chunks of the input features.

    for slot, *rows in tiles:
        for i, a in enumerate(lora_a):
            for c, chunk in enumerate(chunks of the input features):
                partial[i, c, rows] = x[rows, chunk] @ a[slot, 0, :, chunk].T      # float32

Each partial sum is written once, by one program, so nothing is zeroed and nothing is added atomically; expand adds the
chunks in order. Rows without an adapter, and columns at or above a slot's own rank, are neither read nor written.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# (Triton's device code is not typed Python.)

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from lorazor.kernels.launch import check_slices, pdl_options, three
from lorazor.kernels.plan import Plan, plan_for


@triton.jit
def slot_rank(ranks_ptr, slot, RANK: tl.constexpr, HAS_RANKS: tl.constexpr):
    """The columns that the slot's adapter fills, rounded up to 8 so that loads stay 16 bytes wide."""
    if HAS_RANKS:
        return (tl.load(ranks_ptr + slot) + 7) // 8 * 8
    else:
        return RANK


@triton.jit
def _shrink_kernel(
    x_ptr,
    a0_ptr,
    a1_ptr,
    a2_ptr,
    partial_ptr,
    tiles_ptr,
    ranks_ptr,
    K,
    stride_x,
    stride_slice,
    stride_split,
    RANK: tl.constexpr,
    CHUNK: tl.constexpr,
    WHOLE_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_RANKS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one tile, one slice, BLOCK_RANK ranks, one chunk (or all of them, summed in order)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n_rank: tl.constexpr = (RANK + BLOCK_RANK - 1) // BLOCK_RANK
    i_rank = tl.program_id(0) % n_rank
    i_split = tl.program_id(0) // n_rank
    i_slice = tl.program_id(1)
    p_tile = tiles_ptr + tl.program_id(2) * (BLOCK_ROWS + 1)
    slot = tl.load(p_tile)
    b_row = tl.load(p_tile + 1 + tl.arange(0, BLOCK_ROWS))
    if slot < 0:
        if PDL:
            tl.extra.cuda.gdc_wait()
        return
    rank = slot_rank(ranks_ptr, slot, RANK, HAS_RANKS)
    if i_rank * BLOCK_RANK >= rank:
        if PDL:
            tl.extra.cuda.gdc_wait()
        return

    a_ptr = a0_ptr
    if i_slice == 1:
        a_ptr = a1_ptr
    if i_slice == 2:
        a_ptr = a2_ptr
    o_rank = i_rank * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    o_k = i_split * CHUNK + tl.arange(0, BLOCK_K)
    m_row = (b_row >= 0)[:, None]
    m_rank = (o_rank < rank)[:, None]
    p_x = x_ptr + b_row.to(tl.int64)[:, None] * stride_x + o_k[None, :]
    p_a = a_ptr + slot.to(tl.int64) * (RANK * K) + o_rank[:, None] * K + o_k[None, :]
    b_total = tl.zeros((BLOCK_ROWS, BLOCK_RANK), dtype=tl.float32)
    if WHOLE_K:
        if PDL:
            tl.extra.cuda.gdc_wait()
        b_sum = tl.zeros((BLOCK_ROWS, BLOCK_RANK), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            m_k = (o_k < K - k)[None, :]
            b_x = tl.load(p_x + k, mask=m_row if EVEN_K else m_row & m_k, other=0.0)
            b_a = tl.load(p_a + k, mask=m_rank if EVEN_K else m_rank & m_k, other=0.0)
            b_sum = tl.dot(b_x, tl.trans(b_a), b_sum, input_precision="ieee")
            done = ((k + BLOCK_K) % CHUNK == 0) | (k + BLOCK_K >= K)
            b_total = tl.where(done, b_total + b_sum, b_total)
            b_sum = tl.where(done, 0.0, b_sum)
    else:
        m_k = (o_k < K)[None, :]
        b_a = tl.load(p_a, mask=m_rank if EVEN_K else m_rank & m_k, other=0.0)
        if PDL:
            tl.extra.cuda.gdc_wait()
        b_x = tl.load(p_x, mask=m_row if EVEN_K else m_row & m_k, other=0.0)
        b_total = tl.dot(b_x, tl.trans(b_a), b_total, input_precision="ieee")
        for k in range(BLOCK_K, CHUNK, BLOCK_K):
            m_k = (o_k < K - k)[None, :]
            b_x = tl.load(p_x + k, mask=m_row if EVEN_K else m_row & m_k, other=0.0)
            b_a = tl.load(p_a + k, mask=m_rank if EVEN_K else m_rank & m_k, other=0.0)
            b_total = tl.dot(b_x, tl.trans(b_a), b_total, input_precision="ieee")

    p_out = partial_ptr + i_slice.to(tl.int64) * stride_slice + i_split.to(tl.int64) * stride_split
    p_out = p_out + b_row.to(tl.int64)[:, None] * RANK + o_rank[None, :]
    tl.store(p_out, b_total, mask=m_row & (o_rank < rank)[None, :])


def shrink(
    x: torch.Tensor,
    lora_a: Sequence[torch.Tensor],
    tiles: torch.Tensor,
    *,
    ranks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    plan: Plan | None = None,
) -> torch.Tensor:
    """The partial sums, float32 [slices, splits, rows, rank]; only the active rows' cells are written.

    Args:
        x: [rows, K], the last dimension dense; float16, bfloat16 (or float32).
        lora_a: 1 to 3 weights [max_loras, 1, rank, K], of x's dtype.
        tiles: int32 [tiles, 1 + block], see `metadata.py`.
        ranks: int32 [max_loras], each slot's own rank; columns from there on must be zero in the weights. None: all.
        out: memory for the result. plan: see `plan.py`; by default from the shapes.

    Raises:
        ValueError: a shape, stride or dtype does not fit.
    """
    rows, in_features = x.shape
    rank = lora_a[0].shape[2]
    check_slices(lora_a, rank, x.dtype)
    if x.stride(1) != 1 or any(a.shape[2:] != (rank, in_features) for a in lora_a):
        raise ValueError(f"x {tuple(x.shape)} must be dense and fit lora_a {[tuple(a.shape) for a in lora_a]}")
    plan = plan or plan_for(rows, in_features, rank)
    splits = plan.splits(in_features)
    shape = (len(lora_a), splits, rows, rank)
    if out is None:
        out = torch.empty(shape, dtype=torch.float32, device=x.device)
    elif out.shape != shape or not out.is_contiguous():
        raise ValueError(f"out must be contiguous {shape}, is {tuple(out.shape)}")
    a0, a1, a2 = three(lora_a)
    _shrink_kernel[(splits * triton.cdiv(rank, plan.shrink_rank), len(lora_a), tiles.shape[0])](
        x_ptr=x,
        a0_ptr=a0,
        a1_ptr=a1,
        a2_ptr=a2,
        partial_ptr=out,
        tiles_ptr=tiles,
        ranks_ptr=tiles if ranks is None else ranks,
        K=in_features,
        stride_x=x.stride(0),
        stride_slice=out.stride(0),
        stride_split=out.stride(1),
        RANK=rank,
        CHUNK=plan.chunk,
        WHOLE_K=plan.whole_k,
        EVEN_K=in_features % (plan.block_k if plan.whole_k else plan.chunk) == 0,
        HAS_RANKS=ranks is not None,
        BLOCK_ROWS=tiles.shape[1] - 1,
        BLOCK_RANK=plan.shrink_rank,
        BLOCK_K=plan.block_k,
        num_warps=plan.shrink_warps,
        num_stages=plan.shrink_stages,
        **pdl_options(plan.pdl, x.device),
    )
    return out
