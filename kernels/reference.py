"""The kernels' meaning in plain PyTorch, with their signatures: for tests, for a CPU, and as a baseline.

    for slot, *rows in tiles:                                        # rows of one adapter
        for i, (a, b) in enumerate(zip(lora_a, lora_b)):
            columns = slice(offset + widths before i, … + width of i)
            y[rows, columns] += (x[rows] @ a[slot, 0].T) @ b[slot, 0].T

Sums are float32 (float64 for float64 inputs); the low-rank vector is rounded to the weights' dtype, as in the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from lorazor.kernels.plan import Plan


def _tiles(tiles: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """The slot and the rows of each tile in use."""
    for slot, *rows in tiles[1 : 1 + int(tiles[0, 0])].tolist():
        yield slot, torch.tensor([row for row in rows if row >= 0], device=tiles.device)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """At least float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def shrink(
    x: torch.Tensor,
    lora_a: Sequence[torch.Tensor],
    tiles: torch.Tensor,
    *,
    ranks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    plan: Plan | None = None,
) -> torch.Tensor:
    """As `lorazor.kernels.shrink.shrink`, with one split. `ranks` and `plan` change no value, so they are not used."""
    del ranks, plan
    if out is None:
        shape = (x.shape[0], len(lora_a), 1, lora_a[0].shape[2])
        out = torch.empty(shape, dtype=_wide(x[:0]).dtype, device=x.device)
    for slot, rows in _tiles(tiles):
        for i, a in enumerate(lora_a):
            out[rows, i, 0] = _wide(x[rows]) @ _wide(a[slot, 0]).T
    return out


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
    """As `lorazor.kernels.expand.expand`, for any number of slices."""
    del ranks, plan
    for slot, rows in _tiles(tiles):
        start = offset
        for i, b in enumerate(lora_b):
            low = _wide(partial[rows, i].sum(1).to(b.dtype))
            update = low @ _wide(b[slot, 0]).T
            columns = slice(start, start + b.shape[2])
            y[rows, columns] = (_wide(y[rows, columns]) + update if add else update).to(y.dtype)
            start += b.shape[2]
    return y
