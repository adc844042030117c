"""The policy's trees on the GPU: every row's score in one launch, in float64.

    for row in rows:
        total = 0.0
        for tree in trees:
            node = 0
            while node is no leaf:
                x = features[row, tree.feature[node]]
                left = tree.nan_left[node] if isnan(x) else tree.zero_left[node] if |x| <= 1e-35 else x <= threshold
                node = tree.child[node] + (not left)
            total += tree.value[node]
        out[row] = 1 / (1 + exp(-sigmoid * total))

One program does one row, one thread of it one tree (of TREES at a time), so 256 rows are all under way at once and the
time is that of one walk down: a chain of two dependent loads a level. A node is therefore one 8-byte record, threshold
and all that steers the walk, and the record of node n stands beside those of node n of the other trees of its block:
near the root, where all trees are at the same few nodes, a warp's 32 loads fall into few cache lines. Leaves lead to
themselves, so each block of trees walks its greatest depth and nobody asks who has arrived. Values are read once.

The order of additions is that of the trees alone, so a row's bits do not depend on its company. `policy/forest.py`
makes the arrays from LightGBM's text, such that float32 comparisons have the outcome of LightGBM's.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# (Triton's device code is not typed Python.)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from lorazor.kernels.summaries import check_rows, listed_row

TREES = 256  # of one block: walked at the same time by one program
WARPS = 8
# A record: bits 0-31 the threshold's, 32-47 the left child, 48-61 the feature, 62 NaN goes left, 63 zero goes left.
MOST_NODES = 1 << 16
MOST_FEATURES = 1 << 14
MOST_CELLS = 1 << 26  # of all blocks, places without a node included: 1 GB

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Forest:
    """Trees on the device, in blocks of TREES; the last one is filled up with trees that are one leaf of value 0.

    Attributes:
        records: int64 [blocks, nodes, TREES].
        values: float64 [blocks, nodes, TREES], a leaf's value times the sigmoid's factor; 0 at a split.
        depths: int32 [blocks], the longest walk of each block.
        features: how many features a row has.
    """

    records: torch.Tensor
    values: torch.Tensor
    depths: torch.Tensor
    features: int


def pack(
    *,
    feature: Array,
    threshold: Array,
    nan_left: Array,
    zero_left: Array,
    child: Array,
    value: Array,
    first: Array,
    depth: Array,
    sigmoid: float,
    features: int,
    device: torch.device | str,
) -> Forest:
    """Put trees on the device; the arguments are the attributes of `policy.forest.Forest`, which describes them.

    Raises:
        ValueError: more features or more nodes in a tree than a record can name, or more memory than is sensible.
    """
    sizes = np.diff(first)
    trees, nodes = len(sizes), int(sizes.max(initial=1))
    if features > MOST_FEATURES or nodes > MOST_NODES:
        raise ValueError(
            f"at most {MOST_FEATURES} features and {MOST_NODES} nodes a tree fit, found {features} and {nodes}"
        )
    blocks = max(1, -(-trees // TREES))
    if blocks * nodes * TREES > MOST_CELLS:
        raise ValueError(f"{trees} trees of up to {nodes} nodes are too many")
    tree = np.repeat(np.arange(trees), sizes)
    node = np.arange(len(child)) - np.repeat(first[:-1], sizes)
    cells = tree // TREES, node, tree % TREES
    # Where there is no node: a leaf of value 0. Only node 0 of trees that do not exist is ever read.
    records = np.full((blocks, nodes, TREES), _records(*_LEAF)[0])
    records[cells] = _records(child, feature, threshold, nan_left, zero_left)
    values = np.zeros(records.shape)
    values[cells] = value * sigmoid
    depths = np.zeros(blocks, np.int32)
    np.maximum.at(depths, np.arange(trees) // TREES, depth)
    on_device = [torch.from_numpy(array).to(device) for array in (records, values, depths)]
    return Forest(on_device[0], on_device[1], on_device[2], features)


_LEAF = tuple(np.array([v]) for v in (0, 0, np.float32(np.inf), True, True))


def _records(child: Array, feature: Array, threshold: Array, nan_left: Array, zero_left: Array) -> Array:
    parts = ((child, 32), (feature, 48), (nan_left, 62), (zero_left, 63))
    record = threshold.astype(np.float32).view(np.uint32).astype(np.uint64)
    for values, shift in parts:
        record |= values.astype(np.uint64) << np.uint64(shift)
    return record.view(np.int64)


@triton.jit
def _goes_right(b_x, b_record):
    """1 where the value goes to the right child, else 0."""
    b_threshold = b_record.to(tl.int32).to(tl.float32, bitcast=True)
    b_left = tl.where(tl.abs(b_x) <= 1e-35, b_record < 0, b_x <= b_threshold)
    b_left = tl.where(b_x != b_x, ((b_record >> 62) & 1) != 0, b_left)
    return tl.where(b_left, 0, 1)


@triton.jit(do_not_specialize=["n_rows", "n_blocks", "n_nodes"])
def _forest_kernel(
    records_ptr,
    values_ptr,
    depths_ptr,
    features_ptr,
    rows_ptr,
    out_ptr,
    n_rows,
    n_blocks,
    n_nodes,
    stride,
    TREES: tl.constexpr,
    HAS_ROWS: tl.constexpr,
):
    """All trees of one listed row."""
    row = listed_row(rows_ptr, tl.program_id(0), n_rows, HAS_ROWS)
    if row >= 0:
        p_features = features_ptr + row.to(tl.int64) * stride
        o_tree = tl.arange(0, TREES)
        total = tl.full((), 0.0, tl.float64)
        for i_block in range(n_blocks):
            o_block = i_block * n_nodes * TREES + o_tree
            b_node = tl.zeros((TREES,), dtype=tl.int32)
            for _ in range(tl.load(depths_ptr + i_block)):
                b_record = tl.load(records_ptr + o_block + b_node * TREES)
                b_x = tl.load(p_features + ((b_record >> 48) & 0x3FFF))
                b_node = ((b_record >> 32) & 0xFFFF).to(tl.int32) + _goes_right(b_x, b_record)
            total += tl.sum(tl.load(values_ptr + o_block + b_node * TREES))
        tl.store(out_ptr + row, 1.0 / (1.0 + tl.exp(-total)))


def score(
    forest: Forest, features: torch.Tensor, *, rows: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The scores of the listed rows, float64 [n] in [0, 1]: LightGBM's but for the order of additions.

    Args:
        features: float32 [n, F], the last dimension dense; NaN is missing.
        rows: int32 [k], the rows to do, on the device; -1 stands for none. None: all rows. Others are not written.
        out: memory for the result.

    Raises:
        ValueError: a shape, stride or dtype does not fit.
    """
    n_rows = features.shape[0]
    if features.dtype != torch.float32 or features.shape != (n_rows, forest.features) or features.stride(1) != 1:
        raise ValueError(
            f"features must be dense float32 [n, {forest.features}], are {features.dtype} {tuple(features.shape)}"
        )
    check_rows(rows)
    if out is None:
        out = torch.empty(n_rows, dtype=torch.float64, device=features.device)
    elif out.dtype != torch.float64 or out.shape != (n_rows,) or not out.is_contiguous():
        raise ValueError(f"out must be contiguous float64 [{n_rows}], is {out.dtype} {tuple(out.shape)}")
    n = n_rows if rows is None else rows.shape[0]
    if n:
        _forest_kernel[(n,)](
            records_ptr=forest.records,
            values_ptr=forest.values,
            depths_ptr=forest.depths,
            features_ptr=features,
            rows_ptr=forest.depths if rows is None else rows,
            out_ptr=out,
            n_rows=n_rows,
            n_blocks=forest.records.shape[0],
            n_nodes=forest.records.shape[1],
            stride=features.stride(0),
            TREES=TREES,
            HAS_ROWS=rows is not None,
            num_warps=WARPS,
        )
    return out
