"""Expand: add the partial sums, project up from the rank, and add to the active rows of the base layer's output.

    for slot, *rows in tiles:
        for i, b in enumerate(lora_b):
            columns = offset of slice i … + its width
            y[rows, columns] += sum(partial[rows, i, :]).to(b.dtype) @ b[slot, 0].T

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

from lorazor.kernels.device import slot_rank, three_way
from lorazor.kernels.launch import check_weights, multiprocessors, pdl_options, three
from lorazor.kernels.plan import Plan, padded_rank, plan_for


@triton.jit
def _slice_of(
    i_n,
    width0: tl.constexpr,
    width1: tl.constexpr,
    width2: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The slice of a block of columns, the block's number in it, the slice's width and its first column."""
    if SLICES == 1:
        return 0, i_n, width0, 0
    else:
        blocks0: tl.constexpr = (width0 + BLOCK_N - 1) // BLOCK_N
        blocks1: tl.constexpr = (width1 + BLOCK_N - 1) // BLOCK_N
        i_slice = tl.where(i_n < blocks0, 0, tl.where(i_n < blocks0 + blocks1, 1, 2))
        first_block = three_way(i_slice, 0, blocks0, blocks0 + blocks1)
        return (
            i_slice,
            i_n - first_block,
            three_way(i_slice, width0, width1, width2),
            three_way(i_slice, 0, width0, width0 + width1),
        )


@triton.jit
def _expand_unit(
    i_n,
    p_tile,
    slot,
    partial_ptr,
    b0_ptr,
    b1_ptr,
    b2_ptr,
    y_ptr,
    ranks_ptr,
    width0: tl.constexpr,
    width1: tl.constexpr,
    width2: tl.constexpr,
    stride_y: tl.constexpr,
    SLICES: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    ADD: tl.constexpr,
    HAS_RANKS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile and BLOCK_N columns of one slice; i_n counts the blocks of all slices."""
    b_row = tl.load(p_tile + 1 + tl.arange(0, BLOCK_ROWS))
    rank = slot_rank(ranks_ptr, slot, RANK, HAS_RANKS)
    i_slice, i_n, width, first_column = _slice_of(i_n, width0, width1, width2, SLICES, BLOCK_N)
    o_rank = tl.arange(0, BLOCK_RANK)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m_row = (b_row >= 0)[:, None]
    m_rank = (o_rank < rank)[None, :]
    m_n = o_n < width
    p_slot = three_way(i_slice, b0_ptr, b1_ptr, b2_ptr) + slot.to(tl.int64) * (width * RANK)
    p_y = y_ptr + b_row.to(tl.int64)[:, None] * stride_y + first_column + o_n[None, :]
    p_partial = partial_ptr + ((b_row.to(tl.int64) * SLICES + i_slice) * SPLITS)[:, None] * RANK + o_rank[None, :]
    p_b = p_slot + o_n[None, :] * RANK + o_rank[:, None]
    b_b = tl.load(p_b, mask=m_n[None, :] & (o_rank < rank)[:, None], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    b_sum = tl.zeros((BLOCK_ROWS, BLOCK_RANK), dtype=tl.float32)
    for i_split in range(SPLITS):
        b_sum += tl.load(p_partial + i_split * RANK, mask=m_row & m_rank, other=0.0)
    if ADD:
        b_y = tl.load(p_y, mask=m_row & m_n[None, :], other=0.0).to(tl.float32)
    else:
        b_y = tl.zeros((BLOCK_ROWS, BLOCK_N), dtype=tl.float32)
    b_y = tl.dot(b_sum.to(b_b.dtype), b_b, b_y, input_precision="ieee")
    tl.store(p_y, b_y.to(y_ptr.dtype.element_ty), mask=m_row & m_n[None, :])


@triton.jit(do_not_specialize=["n_bound"])
def _expand_kernel(
    partial_ptr,
    b0_ptr,
    b1_ptr,
    b2_ptr,
    y_ptr,
    tiles_ptr,
    ranks_ptr,
    n_bound,
    width0: tl.constexpr,
    width1: tl.constexpr,
    width2: tl.constexpr,
    stride_y: tl.constexpr,
    SLICES: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    ADD: tl.constexpr,
    HAS_RANKS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PER_TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The programs take the units of the tiles in use in turn, PER_TILE units a tile."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    n_tiles = tl.load(tiles_ptr)
    for unit in tl.range(tl.program_id(0), n_bound * PER_TILE, tl.num_programs(0), num_stages=1):
        p_tile = tiles_ptr + (1 + unit // PER_TILE) * (BLOCK_ROWS + 1)
        slot = tl.load(p_tile)
        if unit // PER_TILE < n_tiles:
            _expand_unit(
                unit % PER_TILE, p_tile, slot, partial_ptr, b0_ptr, b1_ptr, b2_ptr, y_ptr, ranks_ptr, width0, width1,
                width2, stride_y, SLICES, RANK, SPLITS, ADD, HAS_RANKS, BLOCK_ROWS, BLOCK_RANK, BLOCK_N, PDL,
            )  # fmt: skip
    if PDL:  # noqa: SIM102 (one is known at compile time)
        if tl.program_id(0) == 0:
            tl.extra.cuda.gdc_wait()


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
        partial: float32 [rows, slices, splits, rank], from `shrink`.
        lora_b: 1 to 3 weights [max_loras, 1, width_i, rank], of y's dtype.
        y: [rows, columns], the last dimension dense; slice i lies at `offset` + the widths before it.
        tiles, ranks, plan: as for `shrink`.

    Raises:
        ValueError: a shape, stride or dtype does not fit.
    """
    rows, slices, splits, rank = partial.shape
    check_weights(lora_b, rank, y.dtype)
    widths = [b.shape[2] for b in lora_b]
    if slices != len(lora_b) or any(b.shape[3] != rank for b in lora_b):
        raise ValueError(f"partial {tuple(partial.shape)} must fit lora_b {[tuple(b.shape) for b in lora_b]}")
    if y.stride(1) != 1 or y.shape[0] != rows or offset + sum(widths) > y.shape[1]:
        raise ValueError(f"y {tuple(y.shape)} must be dense and have {rows} rows and {offset + sum(widths)} columns")
    if not partial.is_contiguous():
        raise ValueError("partial must be contiguous")
    plan = plan or plan_for(rows, 1, rank)
    bound, per_tile = tiles.shape[0] - 1, sum(triton.cdiv(width, plan.block_n) for width in widths)
    b0, b1, b2 = three(lora_b)
    width0, width1, width2 = three(widths)
    _expand_kernel[(min(bound * per_tile, plan.expand_programs * multiprocessors(y.device)),)](
        partial_ptr=partial,
        b0_ptr=b0,
        b1_ptr=b1,
        b2_ptr=b2,
        y_ptr=y[:, offset:],
        tiles_ptr=tiles,
        ranks_ptr=tiles if ranks is None else ranks,
        n_bound=bound,
        width0=width0,
        width1=width1,
        width2=width2,
        stride_y=y.stride(0),
        SLICES=slices,
        RANK=rank,
        SPLITS=splits,
        ADD=add,
        HAS_RANKS=ranks is not None,
        BLOCK_ROWS=tiles.shape[1] - 1,
        BLOCK_RANK=padded_rank(rank),
        BLOCK_N=plan.block_n,
        PER_TILE=per_tile,
        num_warps=plan.expand_warps,
        **pdl_options(plan.pdl, y.device),
    )
    return y
