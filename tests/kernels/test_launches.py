"""Shrink and expand by themselves: unwritten memory stays unwritten and unread; misfits are refused."""

from __future__ import annotations

import pytest
import torch

from lorazor.kernels import reference
from lorazor.kernels.plan import plan_for
from tests.kernels.cases import SHAPES, TOLERANCE, dtypes, error, make_layer, tiles_of

SLOTS = [1, -1, 0, 1, -1, 3, 1]
ACTIVE = [row for row, slot in enumerate(SLOTS) if slot >= 0]
IDLE = [row for row, slot in enumerate(SLOTS) if slot < 0]


def test_shrink_writes_active_rows_only(device: str) -> None:
    """In poisoned memory every cell of an active row is written, none of an idle row, and the chunks add up."""
    from lorazor.kernels.shrink import shrink

    for dtype in dtypes(device):
        layer = make_layer((1100, 40, (8, 8)), len(SLOTS), dtype, device)
        tiles = tiles_of(SLOTS, device)
        splits = plan_for(len(SLOTS), 1100, 40).splits(1100)
        out = torch.full((len(SLOTS), 2, splits, 40), float("nan"), device=device)
        shrink(layer.x, layer.lora_a, tiles, out=out)
        assert splits > 1
        assert out[IDLE].isnan().all()
        wide = layer.to(torch.float64)
        exact = reference.shrink(wide.x, wide.lora_a, tiles)[ACTIVE, :, 0]
        assert error(out[ACTIVE].sum(2), exact) <= 1e-5  # tensor cores cut, not round, when they add


def test_expand_never_reads_idle_rows(device: str) -> None:
    """NaN in the idle rows' partial sums reaches nothing."""
    from lorazor.kernels.expand import expand

    layer = make_layer((64, 16, (40, 24)), len(SLOTS), dtypes(device)[0], device)
    tiles = tiles_of(SLOTS, device)
    partial = torch.randn(len(SLOTS), 2, 3, 16, device=device)
    partial[IDLE] = float("nan")
    y = expand(partial, layer.lora_b, layer.y.clone(), tiles)
    plain = reference.expand(partial, layer.lora_b, layer.y.clone(), tiles)
    assert error(y, plain) <= TOLERANCE[y.dtype]
    assert torch.equal(y[IDLE], layer.y[IDLE])


def test_misfits_are_refused(device: str) -> None:
    """A wrong dtype, width, rank or number of slices is an error that names what was found."""
    from lorazor.kernels.expand import expand
    from lorazor.kernels.shrink import shrink

    layer, tiles = make_layer((64, 16, (40,)), 4, dtypes(device)[0], device), tiles_of([0] * 4, device)
    partial = torch.zeros(4, 1, 1, 16, device=device)
    with pytest.raises(ValueError, match=r"found torch\.float64"):
        shrink(layer.x, [w.double() for w in layer.lora_a], tiles)
    with pytest.raises(ValueError, match="1 to 3 slices, not 4"):
        shrink(layer.x, layer.lora_a * 4, tiles)
    with pytest.raises(ValueError, match="must be dense and fit"):
        shrink(layer.x[:, :32], layer.lora_a, tiles)
    with pytest.raises(ValueError, match="40 columns"):
        expand(partial, layer.lora_b, layer.y[:, :39], tiles)
    with pytest.raises(ValueError, match="rank 8"):
        expand(partial[..., :8], layer.lora_b, layer.y, tiles)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("shape", SHAPES, ids=["aligned", "ragged", "slices", "rank80"])
def test_a_thousand_poisoned_repeats(shape: tuple[int, int, tuple[int, ...]]) -> None:
    """From memory full of NaN, back to back, the bits are the same a thousand times: no race, no unwritten cell."""
    from lorazor.kernels.expand import expand
    from lorazor.kernels.shrink import shrink

    layer, tiles = make_layer(shape, 37, torch.bfloat16, "cuda"), tiles_of([0, -1, 2, 2, 1, 3] * 6 + [0], "cuda")
    plan = plan_for(37, shape[0], shape[1])
    splits = (37, len(shape[2]), plan.splits(shape[0]), shape[1])
    active = torch.tensor(([True, False] + [True] * 4) * 6 + [True], device="cuda")
    first, parted = None, torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        partial = torch.full(splits, float("nan"), device="cuda")
        y = torch.full_like(layer.y, float("nan"))
        expand(shrink(layer.x, layer.lora_a, tiles, out=partial), layer.lora_b, y, tiles, add=False)
        first = y if first is None else first
        parted += (y[active] != first[active]).sum()  # NaN differs from itself
    assert not parted
    assert y[~active].isnan().all()
