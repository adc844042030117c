"""The tile list: both builders against the plain meaning, and in-place updates under one bound."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lorazor.kernels.metadata import TileList, tiles_numpy
from lorazor.kernels.plan import DECODE_ROWS, block_rows, tile_bound
from tests.kernels.cases import EXAMPLES, MAX_LORAS, patterns


def plain_tiles(slots: list[int], max_loras: int, rows: int) -> np.ndarray:
    """Tiles by a loop over slots and rows."""
    block = block_rows(rows)
    tiles = np.full((tile_bound(rows, max_loras), 1 + block), -1)
    used = 0
    for slot in range(max_loras):
        mine = [row for row, s in enumerate(slots) if s == slot]
        for first in range(0, len(mine), block):
            some = mine[first : first + block]
            tiles[used, : 1 + len(some)] = [slot, *some]
            used += 1
    return tiles


@settings(deadline=None, max_examples=EXAMPLES)
@given(patterns(80), st.integers(0, 9))
def test_numpy_tiles(slots: list[int], padding: int) -> None:
    """The numpy builder lists every active row once, by slot then row, and leaves the padding rows out."""
    rows = len(slots) + padding
    np.testing.assert_array_equal(tiles_numpy(np.array(slots), MAX_LORAS, rows), plain_tiles(slots, MAX_LORAS, rows))


@settings(deadline=None, max_examples=EXAMPLES)
@given(patterns(80), st.integers(0, 9))
def test_gpu_builder_agrees(device: str, slots: list[int], padding: int) -> None:
    """The one-launch builder gives the numpy builder's tiles, over whatever the buffer held before."""
    rows = len(slots) + padding
    listed = TileList(rows, MAX_LORAS, device)
    listed.view(rows).fill_(77)
    built = listed.build(torch.tensor(slots, dtype=torch.int32, device=device), rows)
    np.testing.assert_array_equal(built.cpu().numpy(), tiles_numpy(np.array(slots), MAX_LORAS, rows))


@pytest.mark.parametrize("rows", [1, DECODE_ROWS, DECODE_ROWS + 1, 2000])
@pytest.mark.parametrize("max_loras", [1, 33])
def test_gpu_builder_on_sizes(device: str, rows: int, max_loras: int) -> None:
    """Both builders agree from one row to a prefill, for one slot and for more than a power of two."""
    slots = np.random.default_rng(rows).integers(-1, max_loras, rows).astype(np.int32)
    listed = TileList(rows, max_loras, device)
    built = listed.build(torch.from_numpy(slots).to(device), rows).cpu().numpy()
    np.testing.assert_array_equal(built, tiles_numpy(slots, max_loras, rows))


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
    expected = tiles_numpy(np.where(active, slots[requests], -1), MAX_LORAS, rows)
    row, position, slot, boundary = (
        torch.from_numpy(array).to(device) for array in (requests, positions, slots, boundaries)
    )
    built = TileList(rows, MAX_LORAS, device).build_by_request(row, position, slot, boundary, rows)
    np.testing.assert_array_equal(built.cpu().numpy(), expected)


def test_updates_are_in_place() -> None:
    """Every update writes the same memory, so a captured launch sees the next step's tiles; at first all are unused."""
    listed = TileList(700, 3, "cpu")
    view = listed.view(40)
    assert (view == -1).all()
    first = listed.copy(np.zeros(40, dtype=np.int32), 40)
    assert first.data_ptr() == view.data_ptr() == listed.view(700).data_ptr()
    listed.copy(np.full(40, -1, dtype=np.int32), 40)
    assert (view == -1).all()


@pytest.mark.parametrize("rows", [1, 16, 17, 512, 513, 4096])
def test_bound_fits_the_worst_case(rows: int) -> None:
    """One row more than full tiles in every slot still fits the bound."""
    max_loras = 7
    slots = np.arange(rows) % max_loras
    assert (tiles_numpy(slots, max_loras, rows)[:, 1:] >= 0).sum() == rows


def test_bad_slots_are_refused() -> None:
    """A slot past the last one, or more slots than rows, is an error that gives both numbers."""
    with pytest.raises(ValueError, match="max_loras = 2, found 2"):
        tiles_numpy(np.array([0, 2]), 2, 2)
    with pytest.raises(ValueError, match="at most 1 rows, has 2"):
        tiles_numpy(np.array([0, 1]), 2, 1)
    with pytest.raises(ValueError, match="1 to 8 rows, not 9"):
        TileList(8, 2, "cpu").view(9)
