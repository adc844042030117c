"""The kernels against the reference: activity patterns, shapes, slices, ranks, poisoned memory."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lorazor.kernels.dispatch import Path, add_lora, path_for
from lorazor.kernels.plan import DECODE_ROWS, plan_for
from tests.kernels.cases import (
    EXAMPLES,
    MAX_LORAS,
    SHAPES,
    TOLERANCE,
    Layer,
    dtypes,
    error,
    exact_add,
    make_layer,
    patterns,
    plain_add,
    tiles_of,
)


def check(layer: Layer, slots: list[int], device: str) -> None:
    """The kernels' error against float64 is no larger than the reference's, and idle rows keep their bits."""
    tiles = tiles_of(slots, device)
    exact = exact_add(layer, tiles)
    plain = plain_add(layer, tiles)
    y = add_lora(layer.y.clone(), layer.x, layer.lora_a, layer.lora_b, tiles, path="triton")
    assert error(y, exact) <= error(plain, exact) + TOLERANCE[y.dtype]
    idle = [row for row, slot in enumerate(slots) if slot < 0]
    assert torch.equal(y[idle], layer.y[idle])


@settings(deadline=None, max_examples=EXAMPLES)
@given(st.sampled_from(SHAPES), patterns(), st.integers(0, 1))
def test_any_activity(device: str, shape: tuple[int, int, tuple[int, ...]], slots: list[int], which: int) -> None:
    """For any pattern of active rows, each gets its own adapter and no other row changes."""
    check(make_layer(shape, len(slots), dtypes(device)[which], device), slots, device)


@pytest.mark.parametrize("shape", SHAPES, ids=["aligned", "ragged", "slices", "rank80"])
@pytest.mark.parametrize("slots", [[-1] * 19, [-1] * 18 + [1], [0] * 33, [3]], ids=["none", "one", "all", "row"])
def test_none_one_all(device: str, shape: tuple[int, int, tuple[int, ...]], slots: list[int]) -> None:
    """No active row, one, all of one adapter over several tiles, and a batch of one row."""
    for dtype in dtypes(device):
        check(make_layer(shape, len(slots), dtype, device), slots, device)


def test_prefill_rows(device: str) -> None:
    """A launch above the decode limit takes larger tiles and gives the same answer."""
    rows = DECODE_ROWS + 9
    slots = [(row // 200) - 1 for row in range(rows)]
    check(make_layer((64, 16, (40, 24)), rows, dtypes(device)[1], device), slots, device)


def test_write_reads_no_output(device: str) -> None:
    """With `add=False` a poisoned output is overwritten in the active rows' columns and nowhere else."""
    layer = make_layer((64, 16, (40, 24)), 5, dtypes(device)[0], device)
    tiles = tiles_of([1, -1, 0, -1, 1], device)
    y = torch.full((5, 80), float("nan"), dtype=layer.y.dtype, device=device)
    add_lora(y, layer.x, layer.lora_a, layer.lora_b, tiles, offset=16, add=False, path="triton")
    written = torch.zeros(5, 80, dtype=torch.bool, device=device)
    written[[0, 2, 4], 16:] = True
    assert torch.equal(y.isfinite(), written)


def test_more_than_three_slices(device: str) -> None:
    """Five slices run as two pairs of launches and land side by side."""
    layer = make_layer((64, 8, (16, 8, 24, 8, 40)), 6, dtypes(device)[0], device)
    check(layer, [0, 1, -1, 2, 3, 0], device)


def test_mixed_ranks_skip_the_padding(device: str) -> None:
    """With each slot's rank given, columns past it are never read: not even NaN there reaches the output."""
    dtype, ranks = dtypes(device)[0], [8, 48, 16, 32]
    layer = make_layer((96, 48, (40, 24)), 9, dtype, device)
    for slot, rank in enumerate(ranks):
        for weight in layer.lora_a:
            weight[slot, 0, rank:] = 0
        for weight in layer.lora_b:
            weight[slot, 0, :, rank:] = 0
    tiles = tiles_of([0, 1, 2, 3, -1, 3, 2, 1, 0], device)
    exact = exact_add(layer, tiles)
    plain = plain_add(layer, tiles)
    for slot, rank in enumerate(ranks):
        for weight in layer.lora_a:
            weight[slot, 0, rank:] = float("nan")
        for weight in layer.lora_b:
            weight[slot, 0, :, rank:] = float("nan")
    own = torch.tensor(ranks, dtype=torch.int32, device=device)
    y = add_lora(layer.y.clone(), layer.x, layer.lora_a, layer.lora_b, tiles, ranks=own, path="triton")
    assert error(y, exact) <= error(plain, exact) + TOLERANCE[dtype]


def test_strided_rows(device: str) -> None:
    """Inputs and outputs may be columns of wider tensors."""
    layer = make_layer((64, 16, (40,)), 6, dtypes(device)[0], device)
    wide_x, wide_y = torch.cat([layer.x, layer.x], 1)[:, 64:], torch.cat([layer.y, layer.y], 1)
    tiles = tiles_of([0, -1, 2, 2, 1, 0], device)
    expected = add_lora(layer.y.clone(), layer.x, layer.lora_a, layer.lora_b, tiles, path="triton")
    kept = wide_y[:, :40].clone()
    add_lora(wide_y[:, 40:], wide_x, layer.lora_a, layer.lora_b, tiles, path="triton")
    assert torch.equal(wide_y[:, 40:], expected)
    assert torch.equal(wide_y[:, :40], kept)


def test_dispatch_is_the_two_launches(device: str) -> None:
    """The dispatcher's result is bit for bit that of shrink then expand, so the kernels really ran."""
    from lorazor.kernels.expand import expand
    from lorazor.kernels.shrink import shrink

    layer = make_layer((1100, 16, (40, 24)), 5, dtypes(device)[0], device)
    tiles = tiles_of([0, -1, 2, 2, 1], device)
    y = expand(shrink(layer.x, layer.lora_a, tiles), layer.lora_b, layer.y.clone(), tiles)
    path: Path | None = None if device == "cuda" else "triton"
    assert torch.equal(add_lora(layer.y.clone(), layer.x, layer.lora_a, layer.lora_b, tiles, path=path), y)


def test_other_divisions_of_the_work(device: str) -> None:
    """Fewer programs and smaller blocks: the same bits on a GPU, and nearly so where products are interpreted."""
    for shape in SHAPES:
        layer = make_layer(shape, 35, dtypes(device)[0], device)
        tiles = tiles_of([0, -1, 2, 2, 1] * 7, device)
        plan = plan_for(35, shape[0], shape[1])
        other = dataclasses.replace(plan, block_k=256, early=False, block_n=32, shrink_programs=1, expand_programs=1)
        plain, divided = (
            add_lora(layer.y.clone(), layer.x, layer.lora_a, layer.lora_b, tiles, plan=p, path="triton")
            for p in (plan, other)
        )
        assert torch.equal(divided, plain) if device == "cuda" else error(divided, plain) <= TOLERANCE[plain.dtype]


def test_a_cpu_takes_the_reference() -> None:
    """A CPU tensor takes the reference, bit for bit, and CUDA means the kernels."""
    layer = make_layer((64, 16, (40,)), 4, torch.float32, "cpu")
    tiles = tiles_of([0, -1, MAX_LORAS - 1, 1], "cpu")
    plain = plain_add(layer, tiles)
    assert torch.equal(add_lora(layer.y.clone(), layer.x, layer.lora_a, layer.lora_b, tiles), plain)
    assert path_for(torch.device("cuda")) == "triton"


def test_import_needs_neither_kernels_nor_vllm() -> None:
    """Importing the dispatcher loads no kernel (so no Triton is needed) and nothing of vLLM."""
    code = "import sys, lorazor.kernels.dispatch, lorazor.kernels.metadata; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "lorazor.kernels.dispatch" in loaded
    assert not {"vllm", "lorazor.kernels.shrink", "lorazor.kernels.build_tiles"} & set(loaded)
