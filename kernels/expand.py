"""Expand: add the partial sums, project up from the rank, and add to the active rows of the base layer's output.

    for slot, *rows in tiles:
        for i, b in enumerate(lora_b):
            columns = offset of slice i … + its width
            y[rows, columns] += sum(partial[i, :, rows]).to(b.dtype) @ b[slot, 0].T

Sums in float32, the chunks in ascending order; the output is rounded once. Slices may differ in width and lie side by
side in y from `offset` on. No other row or column of y is touched.
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
from lorazor.kernels.shrink import slot_rank


@triton.jit
def _expand_kernel(
    partial_ptr,
    b0_ptr,
    b1_ptr,
    b2_ptr,
    y_ptr,
    tiles_ptr,
    ranks_ptr,
    width0,
    width1,
    width2,
    stride_y,
    stride_slice,
    stride_split,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    ADD: tl.constexpr,
    HAS_RANKS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one tile and BLOCK_N columns of one slice; the first grid axis runs over all slices' blocks."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    p_tile = tiles_ptr + tl.program_id(1) * (BLOCK_ROWS + 1)
    slot = tl.load(p_tile)
    b_row = tl.load(p_tile + 1 + tl.arange(0, BLOCK_ROWS))
    if slot < 0:
        if PDL:
            tl.extra.cuda.gdc_wait()
        return
    rank = slot_rank(ranks_ptr, slot, RANK, HAS_RANKS)

    i_n = tl.program_id(0)
    blocks0 = tl.cdiv(width0, BLOCK_N)
    blocks1 = tl.cdiv(width1, BLOCK_N)
    i_slice = (i_n >= blocks0).to(tl.int32) + (i_n >= blocks0 + blocks1).to(tl.int32)
    b_ptr = b0_ptr
    width = width0
    first_column = 0
    if i_slice == 1:
        b_ptr = b1_ptr
        width = width1
        first_column = width0
        i_n -= blocks0
    if i_slice == 2:
        b_ptr = b2_ptr
        width = width2
        first_column = width0 + width1
        i_n -= blocks0 + blocks1

    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    b_row64 = b_row.to(tl.int64)[:, None]
    m_row = (b_row >= 0)[:, None]
    m_n = o_n < width
    m_y = m_row & m_n[None, :]
    p_y = y_ptr + b_row64 * stride_y + first_column + o_n[None, :]
    p_b = b_ptr + slot.to(tl.int64) * (width.to(tl.int64) * RANK) + o_n[:, None] * RANK
    p_partial = partial_ptr + i_slice.to(tl.int64) * stride_slice + b_row64 * RANK
    b_y = tl.zeros((BLOCK_ROWS, BLOCK_N), dtype=tl.float32)
    b_acc = tl.zeros((BLOCK_ROWS, BLOCK_N), dtype=tl.float32)
    n_rank: tl.constexpr = (RANK + BLOCK_RANK - 1) // BLOCK_RANK
    for i_rank in tl.static_range(n_rank):
        o_rank = i_rank * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
        m_rank = (o_rank < rank)[None, :]
        b_b = tl.load(p_b + o_rank[None, :], mask=m_n[:, None] & m_rank, other=0.0)
        if i_rank == 0:
            if PDL:
                tl.extra.cuda.gdc_wait()
            if ADD:
                b_y = tl.load(p_y, mask=m_y, other=0.0).to(tl.float32)
        b_sum = tl.zeros((BLOCK_ROWS, BLOCK_RANK), dtype=tl.float32)
        for i_split in tl.static_range(SPLITS):
            p_split = p_partial + i_split * stride_split + o_rank[None, :]
            b_sum += tl.load(p_split, mask=m_row & m_rank, other=0.0)
        b_acc = tl.dot(b_sum.to(b_b.dtype), tl.trans(b_b), b_acc, input_precision="ieee")
    tl.store(p_y, (b_y + b_acc).to(y_ptr.dtype.element_ty), mask=m_y)


def expand(
    partial: torch.Tensor,
    lora_b: Sequence[torch.Tensor],
    y: torch.Tensor,
    tiles: torch.Tensor,
    *,
    offset: int = 0,
    add: bool = True,
    ranks: torch.Tensor | None = None,
    plan: Plan | None = None,
) -> torch.Tensor:
    """Add to (or, with `add=False`, write) the active rows of y, in place; returns y.

    Args:
        partial: float32 [slices, splits, rows, rank], from `shrink`.
        lora_b: 1 to 3 weights [max_loras, 1, width_i, rank], of y's dtype.
        y: [rows, columns], the last dimension dense; slice i lies at `offset` + the widths before it.
        tiles, ranks, plan: as for `shrink`.

    Raises:
        ValueError: a shape, stride or dtype does not fit.
    """
    slices, splits, rows, rank = partial.shape
    check_slices(lora_b, rank, y.dtype)
    widths = [b.shape[2] for b in lora_b]
    if slices != len(lora_b) or any(b.shape[3] != rank for b in lora_b):
        raise ValueError(f"partial {tuple(partial.shape)} must fit lora_b {[tuple(b.shape) for b in lora_b]}")
    if y.stride(1) != 1 or y.shape[0] != rows or offset + sum(widths) > y.shape[1]:
        raise ValueError(f"y {tuple(y.shape)} must be dense and have {rows} rows and {offset + sum(widths)} columns")
    if not partial.is_contiguous():
        raise ValueError("partial must be contiguous")
    plan = plan or plan_for(rows, 1, rank)
    b0, b1, b2 = three(lora_b)
    width0, width1, width2 = three(widths)
    _expand_kernel[(sum(triton.cdiv(width, plan.block_n) for width in widths), tiles.shape[0])](
        partial_ptr=partial,
        b0_ptr=b0,
        b1_ptr=b1,
        b2_ptr=b2,
        y_ptr=y[:, offset:],
        tiles_ptr=tiles,
        ranks_ptr=tiles if ranks is None else ranks,
        width0=width0,
        width1=width1,
        width2=width2,
        stride_y=y.stride(0),
        stride_slice=partial.stride(0),
        stride_split=partial.stride(1),
        RANK=rank,
        SPLITS=splits,
        ADD=add,
        HAS_RANKS=ranks is not None,
        BLOCK_ROWS=tiles.shape[1] - 1,
        BLOCK_RANK=plan.expand_rank,
        BLOCK_N=plan.block_n,
        num_warps=plan.expand_warps,
        **pdl_options(plan.pdl, y.device),
    )
    return y
