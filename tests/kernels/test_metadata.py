"""The tile list: both builders against the plain meaning, and in-place updates under one bound."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lorazor.kernels.metadata import TileList, tiles_numpy
from lorazor.kernels.plan import DECODE_BLOCK, DECODE_ROWS, PREFILL_BLOCK, block_rows, tile_bound
from tests.kernels.cases import EXAMPLES, MAX_LORAS, patterns


def plain_tiles(slots: list[int], max_loras: int, block: int) -> list[list[int]]:
    """Tiles by a loop over slots and rows."""
    tiles = []
    for slot in range(max_loras):
        mine = [row for row, s in enumerate(slots) if s == slot]
        for first in range(0, len(mine), block):
            some = mine[first : first + block]
            tiles.append([slot, *some, *[-1] * (block - len(some))])
    return tiles


def in_use(tiles: torch.Tensor) -> list[list[int]]:
    """The tiles that a launch reads."""
    used = tiles[1 : 1 + int(tiles[0, 0])]
    return used.tolist()


@settings(deadline=None, max_examples=EXAMPLES)
@given(patterns(80), st.sampled_from([DECODE_BLOCK, PREFILL_BLOCK]))
def test_numpy_tiles(slots: list[int], block: int) -> None:
    """The numpy builder lists every active row once, by slot then row."""
    tiles = torch.from_numpy(tiles_numpy(np.array(slots), MAX_LORAS, block))
    assert in_use(tiles) == plain_tiles(slots, MAX_LORAS, block)


@settings(deadline=None, max_examples=EXAMPLES)
@given(patterns(80), patterns(80))
def test_gpu_builder_agrees(device: str, before: list[int], slots: list[int]) -> None:
    """The one-launch builder gives the same tiles, over whatever the step before left there."""
    listed = TileList(80, MAX_LORAS, device)
    for some in (before, slots):
        listed.build(torch.tensor(some, dtype=torch.int32, device=device))
    assert in_use(listed.view(80)) == plain_tiles(slots, MAX_LORAS, DECODE_BLOCK)


@pytest.mark.parametrize("rows", [1, DECODE_ROWS, DECODE_ROWS + 1, 2000])
@pytest.mark.parametrize("max_loras", [1, 33])
def test_every_launch_finds_its_tiles(device: str, rows: int, max_loras: int) -> None:
    """From one row to a prefill, a launch padded to any number of rows finds the step's rows, by either builder."""
    slots = np.random.default_rng(rows).integers(-1, max_loras, rows).astype(np.int32)
    for copied in (True, False):
        listed = TileList(3000, max_loras, device)
        listed.copy(slots) if copied else listed.build(torch.from_numpy(slots).to(device))
        for padded in {rows, max(rows, DECODE_ROWS), 3000}:
            expected = plain_tiles(slots.tolist(), max_loras, block_rows(padded))
            assert in_use(listed.view(padded)) == expected


@settings(deadline=None, max_examples=EXAMPLES)
@given(st.data())
def test_boundary_rule(device: str, data: st.DataObject) -> None:
    """By request, a row is active if and only if its request has a slot and its position lies below the boundary."""
    n_requests, rows = 5, data.draw(st.integers(1, 40))
    numbers = st.integers(-1, MAX_LORAS - 1)
    slots = np.array(data.draw(st.lists(numbers, min_size=n_requests, max_size=n_requests)), dtype=np.int32)
    boundaries = np.array(data.draw(st.lists(st.integers(0, 9), min_size=5, max_size=5)), dtype=np.int32)
    requests = np.array(data.draw(st.lists(st.integers(-1, 4), min_size=rows, max_size=rows)), dtype=np.int32)
    positions = np.array(data.draw(st.lists(st.integers(0, 9), min_size=rows, max_size=rows)))
    active = (requests >= 0) & (positions < boundaries[requests])
    expected = plain_tiles(np.where(active, slots[requests], -1).tolist(), MAX_LORAS, DECODE_BLOCK)
    row, position, slot, boundary = (
        torch.from_numpy(array).to(device) for array in (requests, positions, slots, boundaries)
    )
    listed = TileList(rows, MAX_LORAS, device)
    listed.build_by_request(row, position, slot, boundary)
    assert in_use(listed.view(rows)) == expected


def test_updates_are_in_place(device: str) -> None:
    """Every update writes the same memory, so a captured launch sees the next step's tiles; at first none is in use."""
    listed = TileList(700, 3, device)
    small, large = listed.view(40), listed.view(700)
    assert in_use(small) == in_use(large) == []
    listed.copy(np.zeros(40, dtype=np.int32))
    assert len(in_use(small)) == 3
    assert len(in_use(large)) == 2
    listed.copy(np.zeros(600, dtype=np.int32))
    assert in_use(small) == []
    assert len(in_use(large)) == 19
    assert small.data_ptr() == listed.view(9).data_ptr()


@pytest.mark.parametrize("rows", [1, 16, 17, 512, 513, 4096])
def test_bound_fits_the_worst_case(rows: int) -> None:
    """One row more than full tiles in every slot still fits the bound."""
    slots = np.arange(rows) % 7
    assert len(tiles_numpy(slots, 7, block_rows(rows))) <= 1 + tile_bound(rows, 7)


def test_bad_slots_are_refused() -> None:
    """A slot past the last one, or more rows than there is room for, is an error that gives both numbers."""
    with pytest.raises(ValueError, match="max_loras = 2, found 2"):
        tiles_numpy(np.array([0, 2]), 2, DECODE_BLOCK)
    with pytest.raises(ValueError, match="at most 8 rows, has 9"):
        TileList(8, 2, "cpu").copy(np.zeros(9, dtype=np.int32))
    with pytest.raises(ValueError, match="1 to 8 rows, not 9"):
        TileList(8, 2, "cpu").view(9)
