"""Blocks copied and tables pointed at the copies, against plain indexing, for any layout of a block."""

from __future__ import annotations

import pytest
import torch

TOKENS, BLOCKS, COLUMNS = 16, 12, 4


def caches(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Layers of different sizes: of one piece of a block and of several, heads before tokens, padded blocks."""
    small = torch.randn(BLOCKS, 2, TOKENS, 8, device=device).to(dtype)
    large = torch.randn(BLOCKS, TOKENS, 5, 64, device=device).to(dtype).transpose(1, 2)
    padded = torch.randn(BLOCKS, TOKENS * 8 + 16, device=device).to(dtype)[:, : TOKENS * 8].view(BLOCKS, TOKENS, 8)
    return [small, large, padded, small]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("step", [1, 2])
def test_copies_and_points(device: str, dtype: torch.dtype, step: int) -> None:
    """Rows 2, 3 and 4 get blocks 6, 6 + step and 6 + 2 step; all other memory stays as it is."""
    from lorazor.kernels.place_shadows import Layers, place_shadows

    layers, rows, blocks = caches(device, dtype), range(2, 5), range(6, 6 + 3 * step, step)
    tables = torch.randint(0, 6, (5, COLUMNS), dtype=torch.int32, device=device)
    row_tables = torch.randint(0, 6, (7, COLUMNS), dtype=torch.int32, device=device)
    requests = torch.tensor([0, 1, 4, 3, 1, 2, 2], dtype=torch.int32, device=device)
    positions = torch.tensor([3, 5, 2 * TOKENS - 1, 3 * TOKENS, 7, 8, 9], device=device)
    slots = torch.arange(7, device=device)
    wanted = [layer.clone() for layer in layers], row_tables.clone(), slots.clone()
    for row, block in zip(rows, blocks, strict=True):
        column, offset = divmod(int(positions[row]), TOKENS)
        if offset:
            for layer in wanted[0]:
                layer[block] = layer[int(tables[requests[row], column])]
        wanted[1][row, column], wanted[2][row] = block, block * TOKENS + offset
    place_shadows(rows, blocks, requests, positions, tables, row_tables, slots, Layers.of(layers), TOKENS)
    torch.testing.assert_close((layers, row_tables, slots), wanted, rtol=0, atol=0)
