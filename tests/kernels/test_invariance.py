"""Batch invariance: a row's bits depend on its input and its adapter alone."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lorazor.kernels.dispatch import add_lora
from lorazor.kernels.plan import DECODE_ROWS, plan_for
from tests.kernels.cases import EXAMPLES, MAX_LORAS, SHAPES, Layer, dtypes, make_layer, patterns, tiles_of


def run(layer: Layer, slots: list[int], device: str, rows: list[int], order: list[int]) -> torch.Tensor:
    """The output of `rows`, in that order, with the adapters moved to the slots `order`."""
    moved = [[w[order].contiguous() for w in weights] for weights in (layer.lora_a, layer.lora_b)]
    names = {slot: place for place, slot in enumerate(order)} | {-1: -1}
    tiles = tiles_of([names[slots[row]] for row in rows], device)
    return add_lora(layer.y[rows].clone(), layer.x[rows].clone(), moved[0], moved[1], tiles, path="triton")


@settings(deadline=None, max_examples=EXAMPLES)
@given(st.sampled_from(SHAPES), patterns(36), st.data())
def test_company_order_and_slot(
    device: str, shape: tuple[int, int, tuple[int, ...]], slots: list[int], data: st.DataObject
) -> None:
    """Leaving rows out, putting them in another order and moving adapters to other slots changes no bit."""
    layer = make_layer(shape, len(slots), dtypes(device)[1], device)
    everything = run(layer, slots, device, list(range(len(slots))), list(range(MAX_LORAS)))
    rows = data.draw(st.permutations(range(len(slots))))[: data.draw(st.integers(1, len(slots)))]
    some = run(layer, slots, device, rows, data.draw(st.permutations(range(MAX_LORAS))))
    assert torch.equal(some, everything[rows])


def test_whole_k_adds_in_the_same_order(device: str) -> None:
    """One program that sums all chunks itself gives the bits that expand gets from the split sums."""
    shape = (1100, 16, (40,))
    layer, tiles = make_layer(shape, 20, dtypes(device)[0], device), tiles_of([0, 1, -1, 2] * 5, device)
    split = plan_for(20, 1100, 16)
    outs = [
        add_lora(layer.y.clone(), layer.x, layer.lora_a, layer.lora_b, tiles, plan=plan, path="triton")
        for plan in (split, dataclasses.replace(split, whole_k=True, early=False))
    ]
    assert torch.equal(outs[0], outs[1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_decode_and_prefill_agree_on_the_gpu() -> None:
    """A row has the same bits in a decode and in a prefill launch, with partial sums and (at rank 256) without."""
    for rank in (16, 256):
        layer = make_layer((4096, rank, (512, 128)), 4 * DECODE_ROWS, torch.bfloat16, "cuda")
        slots = [row % (MAX_LORAS + 1) - 1 for row in range(4 * DECODE_ROWS)]
        small = run(layer, slots, "cuda", list(range(32)), list(range(MAX_LORAS)))
        for rows in (DECODE_ROWS + 32, 4 * DECODE_ROWS):
            large = run(layer, slots, "cuda", list(range(rows)), list(range(MAX_LORAS)))
            assert torch.equal(large[:32], small)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_one_graph_for_every_pattern() -> None:
    """One captured graph gives the eager bits for every later activity pattern, none and all included."""
    from lorazor.kernels.metadata import TileList

    rows = 48
    layer = make_layer((4096, 16, (512, 128, 128)), rows, torch.bfloat16, "cuda")
    listed, out = TileList(rows, MAX_LORAS, "cuda"), layer.y.clone()
    add_lora(out, layer.x, layer.lora_a, layer.lora_b, listed.view(rows))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(layer.y)
        for _ in range(3):
            add_lora(out, layer.x, layer.lora_a, layer.lora_b, listed.view(rows))
    for seed in range(1000):
        generator = torch.Generator().manual_seed(seed)
        slots = torch.randint(-1, MAX_LORAS, (rows,), generator=generator, dtype=torch.int32)
        slots = {0: torch.full_like(slots, -1), 1: slots.clamp_min(0)}.get(seed, slots)
        listed.build(slots.cuda())
        graph.replay()
        replayed, expected = out.clone(), layer.y.clone()
        for _ in range(3):
            add_lora(expected, layer.x, layer.lora_a, layer.lora_b, listed.view(rows))
        assert torch.equal(replayed, expected), seed
