"""The tile lists of a step, built on the GPU in one launch: `metadata.py`'s counting sort, one program per slot."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# (Triton's device code is not typed Python.)

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from lorazor.kernels.plan import DECODE_ROWS


@triton.jit
def _fill(tiles_ptr, b_slot, max_loras, BLOCK: tl.constexpr, SLOTS: tl.constexpr):
    """Write the tiles of slot `program_id(0)` of one list; the first program also writes how many there are in all."""
    i_slot = tl.program_id(0)
    # Rows without an adapter are counted in the bin after the last slot.
    b_bin = tl.where(b_slot >= 0, b_slot, max_loras)
    o_slot = tl.arange(0, SLOTS)
    b_count = tl.histogram(b_bin, SLOTS)
    b_tiles = tl.where(o_slot < max_loras, (b_count + BLOCK - 1) // BLOCK, 0)
    first_tile = 1 + tl.sum(tl.where(o_slot < i_slot, b_tiles, 0))
    end_tile = first_tile + tl.sum(tl.where(o_slot == i_slot, b_tiles, 0))
    count = tl.sum(tl.where(o_slot == i_slot, b_count, 0))
    if i_slot == 0:
        tl.store(tiles_ptr, tl.sum(b_tiles))

    # The slot number and the cells after the last row; the rows' own cells are written below, each cell once.
    o_block = tl.arange(0, BLOCK)
    for i_tile in range(first_tile, end_tile):
        p_tile = tiles_ptr + i_tile * (BLOCK + 1)
        tl.store(p_tile, i_slot)
        tl.store(p_tile + 1 + o_block, -1, mask=(i_tile - first_tile) * BLOCK + o_block >= count)
    b_mine = b_slot == i_slot
    b_within = tl.cumsum(b_mine.to(tl.int32), 0) - 1
    o_cell = (first_tile + b_within // BLOCK) * (BLOCK + 1) + 1 + b_within % BLOCK
    tl.store(tiles_ptr + o_cell, tl.arange(0, b_slot.shape[0]), mask=b_mine)


@triton.jit(do_not_specialize=["n_rows"])
def _build_tiles_kernel(
    row_ptr,
    positions_ptr,
    slot_of_request_ptr,
    boundary_of_request_ptr,
    small_ptr,
    large_ptr,
    n_rows,
    max_loras,
    SMALL: tl.constexpr,
    LARGE: tl.constexpr,
    SMALL_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    BY_REQUEST: tl.constexpr,
):
    """Programs (s, 0) write the list of small tiles, programs (s, 1) that of large ones."""
    o_row = tl.arange(0, ROWS)
    m_row = o_row < n_rows
    b_slot = tl.load(row_ptr + o_row, mask=m_row, other=-1)
    if BY_REQUEST:
        b_request = b_slot
        m_row = m_row & (b_request >= 0)
        b_position = tl.load(positions_ptr + o_row, mask=m_row, other=0)
        b_boundary = tl.load(boundary_of_request_ptr + b_request, mask=m_row, other=0)
        b_slot = tl.load(slot_of_request_ptr + b_request, mask=m_row & (b_position < b_boundary), other=-1)
    if tl.program_id(1) == 0:
        _fill(small_ptr, tl.where(n_rows <= SMALL_ROWS, b_slot, -1), max_loras, SMALL, SLOTS)
    else:
        _fill(large_ptr, b_slot, max_loras, LARGE, SLOTS)


def build_tiles(
    slot_of_row: torch.Tensor,
    rows: int,
    lists: Sequence[torch.Tensor],
    max_loras: int,
    by_request: Sequence[torch.Tensor] | None = None,
) -> None:
    """Fill the lists of small and (if there is one) large tiles from the first `rows` of `slot_of_row`, int32.

    Each list is int32 [1 + bound, 1 + block]. With `by_request` = (positions, slot_of_request, boundary_of_request) the
    first argument holds request indices.
    """
    if slot_of_row.dtype != torch.int32 or not slot_of_row.is_contiguous():
        raise ValueError(f"slot_of_row must be contiguous int32, is {slot_of_row.dtype}")
    positions, slots, boundaries = by_request or (slot_of_row, slot_of_row, slot_of_row)
    _build_tiles_kernel[(max_loras, len(lists))](
        row_ptr=slot_of_row,
        positions_ptr=positions,
        slot_of_request_ptr=slots,
        boundary_of_request_ptr=boundaries,
        small_ptr=lists[0],
        large_ptr=lists[-1],
        n_rows=rows,
        max_loras=max_loras,
        SMALL=lists[0].shape[1] - 1,
        LARGE=lists[-1].shape[1] - 1,
        SMALL_ROWS=DECODE_ROWS,
        ROWS=max(512, triton.next_power_of_2(rows)),
        SLOTS=max(32, triton.next_power_of_2(max_loras + 1)),
        BY_REQUEST=by_request is not None,
        num_warps=4,
    )
