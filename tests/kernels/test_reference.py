"""The reference against one row at a time, straight from the formula."""

from __future__ import annotations

import torch

from lorazor.kernels.dispatch import add_lora
from tests.kernels.cases import MAX_LORAS, make_layer, plain_add, tiles_of


def test_reference_is_the_formula_row_by_row() -> None:
    """Each active row gains B (A x) of its own slot in each slice's columns; the others are untouched."""
    layer = make_layer((48, 8, (16, 24)), 7, torch.float64, "cpu")
    slots = [2, -1, 0, 3, 2, -1, 2]
    expected = layer.y.clone()
    for row, slot in enumerate(slots):
        if slot >= 0:
            updates = [
                b[slot, 0] @ (a[slot, 0] @ layer.x[row]) for a, b in zip(layer.lora_a, layer.lora_b, strict=True)
            ]
            expected[row] += torch.cat(updates)
    out = plain_add(layer, tiles_of(slots, "cpu"))
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(out[[1, 5]], layer.y[[1, 5]])


def test_reference_writes_and_shifts() -> None:
    """`add=False` writes the active rows only, and `offset` moves the slices to the right."""
    layer = make_layer((16, 8, (8,)), 3, torch.float32, "cpu")
    y = torch.full((3, 12), float("nan"))
    tiles = tiles_of([-1, MAX_LORAS - 1, -1], "cpu")
    add_lora(y, layer.x, layer.lora_a, layer.lora_b, tiles, offset=4, add=False, path="reference")
    assert y.isfinite().sum() == 8
    assert y[1, 4:].isfinite().all()
