"""The tile list: which rows of a step hold which adapter, in a buffer that a captured CUDA graph reads at every replay.

Running example: 5 rows, tiles of 2 rows, max_loras = 3, `slot_of_row` = [2, -1, 0, 2, 2] (row 1 was released). Slots
ascend, rows ascend within a slot, and each tile holds rows of one slot:

    tiles = [[3],                    the number of tiles in use; nothing past them is read
             [0,  2, -1],            slot 0: row 2
             [2,  0,  3],            slot 2: rows 0 and 3
             [2,  4, -1],            slot 2: row 4
             …]                      room up to the bound cdiv(5, 2) + min(3, 5) = 6

Column 0 is the slot, the others are row numbers (-1: none). The bound depends on shapes alone, so one launch fits every
pattern, none active and all active included. A step of up to `DECODE_ROWS` rows is listed twice, in small and in large
tiles, since the graph that runs it may be padded to more rows than that.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lorazor.kernels.plan import DECODE_ROWS, block_rows, tile_bound

STAGED = 8  # copies to the device under way at once, before the host waits for the oldest


def tiles_numpy(slot_of_row: np.ndarray[Any, Any], max_loras: int, block: int) -> np.ndarray[Any, Any]:
    """The tiles in use, int32 [1 + tiles, 1 + block], for rows with slots in [-1, max_loras).

    Raises ValueError for a slot at or above max_loras.
    """
    active = np.flatnonzero(slot_of_row >= 0)
    order = active[np.argsort(slot_of_row[active], kind="stable")]
    slots = slot_of_row[order]
    if slots.size and slots[-1] >= max_loras:
        raise ValueError(f"slots must lie below max_loras = {max_loras}, found {slots[-1]}")
    counts = np.bincount(slots, minlength=max_loras)
    tiles_of_slot = -(-counts // block)
    first_tile = 1 + np.cumsum(tiles_of_slot) - tiles_of_slot
    first_row = np.cumsum(counts) - counts
    within = np.arange(len(order)) - first_row[slots]  # a row's place among its slot's rows
    tile = first_tile[slots] + within // block
    tiles = np.full((1 + tiles_of_slot.sum(), 1 + block), -1, dtype=np.int32)
    tiles[0, 0] = tiles_of_slot.sum()
    tiles[tile, 0] = slots
    tiles[tile, 1 + within % block] = order
    return tiles


class TileList:
    """The tiles of the current step, at fixed addresses, updated in place."""

    def __init__(self, max_rows: int, max_loras: int, device: torch.device | str) -> None:
        """Room for steps of up to `max_rows` rows; until the first update no row holds an adapter."""
        self.max_rows, self.max_loras = max_rows, max_loras
        self._device = torch.device(device)
        sizes = sorted({min(max_rows, DECODE_ROWS), max_rows})
        self._lists = {block_rows(rows): self._empty(rows) for rows in sizes}
        on_gpu = self._device.type == "cuda"
        self._staging = [torch.empty(max_rows, dtype=torch.int32, pin_memory=on_gpu) for _ in range(STAGED)]
        self._staged = [torch.cuda.Event() for _ in range(STAGED if on_gpu else 0)]  # type: ignore[no-untyped-call]
        self._slots = torch.empty(max_rows, dtype=torch.int32, device=self._device)
        self._turn = 0

    def _empty(self, rows: int) -> torch.Tensor:
        shape = (1 + tile_bound(rows, self.max_loras), 1 + block_rows(rows))
        return torch.zeros(shape, dtype=torch.int32, device=self._device)

    def view(self, rows: int) -> torch.Tensor:
        """The tiles of a launch over `rows` rows, int32 [1 + bound, 1 + block]: always the same memory.

        Raises ValueError for more rows than there is room for.
        """
        if not 0 < rows <= self.max_rows:
            raise ValueError(f"a launch must have 1 to {self.max_rows} rows, not {rows}")
        return self._lists[block_rows(rows)][: 1 + tile_bound(rows, self.max_loras)]

    def _check(self, rows: int) -> None:
        if rows > self.max_rows:
            raise ValueError(f"a step must have at most {self.max_rows} rows, has {rows}")

    def copy(self, slot_of_row: np.ndarray[Any, Any]) -> None:
        """Update from host slots, int [rows]; on a GPU by one copy and one launch that the host does not wait for."""
        rows = len(slot_of_row)
        self._check(rows)
        if self._device.type == "cpu":
            self._copy_on_cpu(slot_of_row)
            return
        self._turn = (self._turn + 1) % STAGED
        staging, copied = self._staging[self._turn], self._staged[self._turn]
        copied.synchronize()  # long past, unless the host runs STAGED steps ahead
        staging.numpy()[:rows] = slot_of_row
        self._slots.copy_(staging, non_blocking=True)  # all of it: what lies past the rows is not read
        copied.record()
        self._build(self._slots, rows)

    def _copy_on_cpu(self, slot_of_row: np.ndarray[Any, Any]) -> None:
        for block, tiles in self._lists.items():
            listed = slot_of_row if block >= block_rows(len(slot_of_row)) else slot_of_row[:0]
            found = tiles_numpy(listed, self.max_loras, block)
            tiles[: len(found)].copy_(torch.from_numpy(found))

    def build(self, slot_of_row: torch.Tensor) -> None:
        """Update from device slots, int32 [rows], in one launch, with nothing read back."""
        self._build(slot_of_row, slot_of_row.shape[0])

    def build_by_request(
        self,
        request_of_row: torch.Tensor,
        positions: torch.Tensor,
        slot_of_request: torch.Tensor,
        boundary_of_request: torch.Tensor,
    ) -> None:
        """Update by the boundary rule: row i is active if its request has a slot and positions[i] < its boundary.

        `request_of_row` int32 and `positions` int64 [rows]; `slot_of_request` (-1: none) and `boundary_of_request`
        int32 [requests]. Nothing is read back.
        """
        self._build(request_of_row, request_of_row.shape[0], (positions, slot_of_request, boundary_of_request))

    def _build(self, of_row: torch.Tensor, rows: int, by_request: tuple[torch.Tensor, ...] | None = None) -> None:
        from lorazor.kernels.build_tiles import build_tiles

        self._check(rows)
        build_tiles(of_row, rows, list(self._lists.values()), self.max_loras, by_request)
