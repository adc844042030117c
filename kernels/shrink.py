"""Shrink: project the active rows down to the rank, as partial sums over chunks of the input features.

    for slot, *rows in tiles:
        for i, a in enumerate(lora_a):
            for c, chunk in enumerate(chunks of the input features):
                partial[rows, i, c] = x[rows, chunk] @ a[slot, 0, :, chunk].T      # float32

Each partial sum is written once, by one unit of work, so nothing is zeroed and nothing is added atomically; expand adds
the chunks in order. Rows without an adapter, and columns at or above a slot's own rank, are neither read nor written.
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
from lorazor.kernels.plan import LANES, Plan, plan_for


@triton.jit
def _add_lanes(b_sum):
    """The sum over the lanes, [8, rows, rank] -> [rows, rank], in an order that no layout decides."""
    b_pair = tl.reshape(tl.permute(b_sum, 1, 2, 0), (b_sum.shape[1], b_sum.shape[2], 4, 2))
    even, odd = tl.split(b_pair)
    b_pair = tl.reshape(even + odd, (b_sum.shape[1], b_sum.shape[2], 2, 2))
    even, odd = tl.split(b_pair)
    first, second = tl.split(even + odd)
    return first + second


@triton.jit
def _chunk_sum(
    p_x,
    p_a,
    o_k,
    k,
    m_row,
    m_rank,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """x @ a.T over the chunk that starts at k; each lane sums CHUNK // LANES neighbouring features."""
    b_sum = tl.zeros((LANES, m_row.shape[1], m_rank.shape[1]), dtype=tl.float32)
    for i in tl.range(0, CHUNK // LANES, BLOCK_K // LANES, num_stages=STAGES):
        m_k = o_k < K - k - i
        b_x = tl.load(p_x + (k + i), mask=m_row if EVEN_K else m_row & m_k, other=0.0)
        b_a = tl.load(p_a + (k + i), mask=m_rank if EVEN_K else m_rank & m_k, other=0.0)
        b_sum = tl.dot(b_x, tl.permute(b_a, 0, 2, 1), b_sum, input_precision="ieee")
    return _add_lanes(b_sum)


@triton.jit
def _shrink_unit(
    unit,
    p_tile,
    slot,
    x_ptr,
    a0_ptr,
    a1_ptr,
    a2_ptr,
    partial_ptr,
    ranks_ptr,
    K: tl.constexpr,
    stride_x: tl.constexpr,
    SLICES: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_RANKS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile, one slice, BLOCK_RANK ranks, one chunk; or, if there is one split, all chunks summed in order."""
    n_rank: tl.constexpr = (RANK + BLOCK_RANK - 1) // BLOCK_RANK
    i_split = unit % SPLITS
    i_rank = (unit // SPLITS) % n_rank
    i_slice = unit // (SPLITS * n_rank)
    rank = slot_rank(ranks_ptr, slot, RANK, HAS_RANKS)
    if i_rank * BLOCK_RANK < rank:
        b_row = tl.load(p_tile + 1 + tl.arange(0, BLOCK_ROWS))
        o_rank = i_rank * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
        o_k = (tl.arange(0, LANES) * (CHUNK // LANES))[:, None, None] + tl.arange(0, BLOCK_K // LANES)[None, None, :]
        first = i_split * CHUNK
        m_row = (b_row >= 0)[None, :, None]
        m_rank = (o_rank < rank)[None, :, None]
        p_slot = three_way(i_slice, a0_ptr, a1_ptr, a2_ptr) + slot.to(tl.int64) * (RANK * K)
        p_x = x_ptr + b_row.to(tl.int64)[None, :, None] * stride_x + o_k
        p_a = p_slot + o_rank[None, :, None] * K + o_k
        if EARLY:
            b_a = tl.load(p_a + first, mask=m_rank if EVEN_K else m_rank & (o_k < K - first), other=0.0)
            if PDL:
                tl.extra.cuda.gdc_wait()
            b_x = tl.load(p_x + first, mask=m_row if EVEN_K else m_row & (o_k < K - first), other=0.0)
            b_sum = tl.zeros((LANES, BLOCK_ROWS, BLOCK_RANK), dtype=tl.float32)
            b_total = _add_lanes(tl.dot(b_x, tl.permute(b_a, 0, 2, 1), b_sum, input_precision="ieee"))
        else:
            if PDL:
                tl.extra.cuda.gdc_wait()
            b_total = _chunk_sum(p_x, p_a, o_k, first, m_row, m_rank, K, CHUNK, BLOCK_K, LANES, STAGES, EVEN_K)
            if SPLITS == 1:
                for k in tl.range(CHUNK, K, CHUNK, num_stages=1):
                    b_total += _chunk_sum(p_x, p_a, o_k, k, m_row, m_rank, K, CHUNK, BLOCK_K, LANES, STAGES, EVEN_K)
        p_out = partial_ptr + ((b_row.to(tl.int64) * SLICES + i_slice) * SPLITS + i_split)[:, None] * RANK
        tl.store(p_out + o_rank[None, :], b_total, mask=(b_row >= 0)[:, None] & (o_rank < rank)[None, :])


@triton.jit(do_not_specialize=["n_bound"])
def _shrink_kernel(
    x_ptr,
    a0_ptr,
    a1_ptr,
    a2_ptr,
    partial_ptr,
    tiles_ptr,
    ranks_ptr,
    n_bound,
    K: tl.constexpr,
    stride_x: tl.constexpr,
    SLICES: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_RANKS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """The programs take the units of the tiles in use in turn."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    per_tile: tl.constexpr = SPLITS * ((RANK + BLOCK_RANK - 1) // BLOCK_RANK) * SLICES
    n_tiles = tl.load(tiles_ptr)
    for unit in tl.range(tl.program_id(0), n_bound * per_tile, tl.num_programs(0), num_stages=1):
        p_tile = tiles_ptr + (1 + unit // per_tile) * (BLOCK_ROWS + 1)
        slot = tl.load(p_tile)  # of a tile that may not be in use: asked for along with their number, to save a wait
        if unit // per_tile < n_tiles:
            _shrink_unit(
                unit % per_tile, p_tile, slot, x_ptr, a0_ptr, a1_ptr, a2_ptr, partial_ptr, ranks_ptr, K, stride_x,
                SLICES, RANK, SPLITS, CHUNK, EVEN_K, HAS_RANKS, BLOCK_ROWS, BLOCK_RANK, BLOCK_K, LANES, STAGES,
                EARLY, PDL,
            )  # fmt: skip
    if PDL:  # noqa: SIM102 (one is known at compile time)
        if tl.program_id(0) == 0:
            tl.extra.cuda.gdc_wait()


def shrink(
    x: torch.Tensor,
    lora_a: Sequence[torch.Tensor],
    tiles: torch.Tensor,
    *,
    ranks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    plan: Plan | None = None,
) -> torch.Tensor:
    """The partial sums, float32 [rows, slices, splits, rank]; only the active rows' cells are written.

    Args:
        x: [rows, K], the last dimension dense; float16, bfloat16 (or float32).
        lora_a: 1 to 3 weights [max_loras, 1, rank, K], of x's dtype.
        tiles: int32 [1 + tiles, 1 + block], see `metadata.py`.
        ranks: int32 [max_loras], each slot's own rank; columns from there on must be zero in the weights. None: all.
        out: memory for the result. plan: see `plan.py`; by default from the shapes.

    Raises:
        ValueError: a shape, stride or dtype does not fit.
    """
    rows, in_features = x.shape
    rank = lora_a[0].shape[2]
    check_weights(lora_a, rank, x.dtype)
    if x.stride(1) != 1 or any(a.shape[2:] != (rank, in_features) for a in lora_a):
        raise ValueError(f"x {tuple(x.shape)} must be dense and fit lora_a {[tuple(a.shape) for a in lora_a]}")
    plan = plan or plan_for(rows, in_features, rank)
    splits, bound = plan.splits(in_features), tiles.shape[0] - 1
    shape = (rows, len(lora_a), splits, rank)
    if out is None:
        out = torch.empty(shape, dtype=torch.float32, device=x.device)
    elif out.shape != shape or not out.is_contiguous():
        raise ValueError(f"out must be contiguous {shape}, is {tuple(out.shape)}")
    a0, a1, a2 = three(lora_a)
    units = bound * splits * triton.cdiv(rank, plan.shrink_rank) * len(lora_a)
    _shrink_kernel[(min(units, plan.shrink_programs * multiprocessors(x.device)),)](
        x_ptr=x,
        a0_ptr=a0,
        a1_ptr=a1,
        a2_ptr=a2,
        partial_ptr=out,
        tiles_ptr=tiles,
        ranks_ptr=tiles if ranks is None else ranks,
        n_bound=bound,
        K=in_features,
        stride_x=x.stride(0),
        SLICES=len(lora_a),
        RANK=rank,
        SPLITS=splits,
        CHUNK=plan.chunk,
        EVEN_K=in_features % plan.chunk == 0,
        HAS_RANKS=ranks is not None,
        BLOCK_ROWS=tiles.shape[1] - 1,
        BLOCK_RANK=plan.shrink_rank,
        BLOCK_K=plan.block_k,
        LANES=LANES,
        STAGES=plan.stages,
        EARLY=plan.early,
        num_warps=LANES,
        **pdl_options(plan.pdl, x.device),
    )
    return out
