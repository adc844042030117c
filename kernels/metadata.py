"""The tile list: which rows of a step hold which adapter, in a buffer that a captured CUDA graph reads at every replay.

Running example: 5 rows, tiles of 2 rows, max_loras = 3, `slot_of_row` = [2, -1, 0, 2, 2] (row 1 was released). Slots
ascend, rows ascend within a slot, and each tile holds rows of one slot:

    tiles = [[ 0,  2, -1],     slot 0: row 2
             [ 2,  0,  3],     slot 2: rows 0 and 3
             [ 2,  4, -1],     slot 2: row 4
             [-1, -1, -1], …]  unused, up to the bound cdiv(5, 2) + min(3, 5) = 6

Column 0 is the slot (-1: unused), the others are row numbers (-1: none). The bound depends on shapes alone, so a launch
over all its tiles fits every pattern, none active and all active included. Two builders give the same tiles: one
launch on the GPU without any read back (`TileList.build`), and numpy with one copy (`TileList.copy`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lorazor.kernels.plan import DECODE_ROWS, block_rows, tile_bound


def tiles_numpy(slot_of_row: np.ndarray[Any, Any], max_loras: int, rows: int) -> np.ndarray[Any, Any]:
    """The tiles, int32 [tile_bound, 1 + block], of a launch of `rows` rows.

    `slot_of_row` holds ints in [-1, max_loras), for the first rows of the launch; rows past its end hold no adapter.
    Raises ValueError for a slot at or above max_loras and for more slots than rows.
    """
    if len(slot_of_row) > rows:
        raise ValueError(f"slot_of_row must have at most {rows} rows, has {len(slot_of_row)}")
    block = block_rows(rows)
    active = np.flatnonzero(slot_of_row >= 0)
    order = active[np.argsort(slot_of_row[active], kind="stable")]
    slots = slot_of_row[order]
    if slots.size and slots[-1] >= max_loras:
        raise ValueError(f"slots must lie below max_loras = {max_loras}, found {slots[-1]}")
    counts = np.bincount(slots, minlength=max_loras)
    tiles_of_slot = -(-counts // block)
    first_tile = np.cumsum(tiles_of_slot) - tiles_of_slot
    first_row = np.cumsum(counts) - counts
    within = np.arange(len(order)) - first_row[slots]  # a row's place among its slot's rows
    tile = first_tile[slots] + within // block
    tiles = np.full((tile_bound(rows, max_loras), 1 + block), -1, dtype=np.int32)
    tiles[tile, 0] = slots
    tiles[tile, 1 + within % block] = order
    return tiles


class TileList:
    """The tiles of the current step, at a fixed address, updated in place."""

    def __init__(self, max_rows: int, max_loras: int, device: torch.device | str) -> None:
        """Room for launches of up to `max_rows` rows; until the first update no row holds an adapter."""
        self.max_rows, self.max_loras = max_rows, max_loras
        largest = {max_rows, min(max_rows, DECODE_ROWS)}
        room = max(tile_bound(rows, max_loras) * (1 + block_rows(rows)) for rows in largest)
        self._flat = torch.full((room,), -1, dtype=torch.int32, device=device)
        pinned = torch.device(device).type == "cuda"
        self._staging = torch.empty(room, dtype=torch.int32, pin_memory=pinned)
        self._copied = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]

    def view(self, rows: int) -> torch.Tensor:
        """The tiles of a launch of `rows` rows, int32 [tile_bound, 1 + block]: the same memory at every call."""
        if not 0 < rows <= self.max_rows:
            raise ValueError(f"a launch must have 1 to {self.max_rows} rows, not {rows}")
        shape = (tile_bound(rows, self.max_loras), 1 + block_rows(rows))
        return self._flat[: shape[0] * shape[1]].view(shape)

    def copy(self, slot_of_row: np.ndarray[Any, Any], rows: int) -> torch.Tensor:
        """Update from host slots, int [<= rows], by numpy and one copy that the host does not wait for."""
        tiles = tiles_numpy(slot_of_row, self.max_loras, rows)
        if self._copied is not None:
            self._copied.synchronize()  # the copy before this one must have left the staging memory
        staged = self._staging[: tiles.size].view(tiles.shape)
        staged.numpy()[...] = tiles
        out = self.view(rows)
        out.copy_(staged, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        return out

    def build(self, slot_of_row: torch.Tensor, rows: int) -> torch.Tensor:
        """Update from device slots, int32 [<= rows], in one launch, with nothing read back."""
        from lorazor.kernels.build_tiles import build_tiles

        return build_tiles(slot_of_row, self.view(rows), self.max_loras)

    def build_by_request(
        self,
        request_of_row: torch.Tensor,
        positions: torch.Tensor,
        slot_of_request: torch.Tensor,
        boundary_of_request: torch.Tensor,
        rows: int,
    ) -> torch.Tensor:
        """Update by the boundary rule: row i is active if its request has a slot and positions[i] < its boundary.

        `request_of_row` int32 and `positions` int64 [<= rows]; `slot_of_request` (-1: none) and `boundary_of_request`
        int32 [requests]. One launch, with nothing read back.
        """
        from lorazor.kernels.build_tiles import build_tiles

        by_request = (positions, slot_of_request, boundary_of_request)
        return build_tiles(request_of_row, self.view(rows), self.max_loras, by_request)
