"""Adapters swapped into slots on a GPU: stages, streams and events, and engines whose graphs read the slots."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lorazor.runtime import slot_layout
from lorazor.runtime.slot_images import Image, Room
from lorazor.runtime.slot_loader import STAGES, StagedLoader
from tests.runtime.engine_process import run_apart
from tests.runtime.test_gpu_kernels import GRAPHS, V1, V2, assert_texts
from tests.runtime.tiny import Ask, Reference, Tiny, prompt

pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.slow]

SLOTS, SIZES = 3, ((16, 40), (8, 4096), (1, 5000))


@pytest.fixture(scope="module", autouse=True)
def _needs_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture
def layout(monkeypatch: pytest.MonkeyPatch) -> slot_layout.SlotLayout:
    """Stacks like those of layers, parts of them not a multiple of the alignment."""
    stacks = [torch.full((SLOTS, 1, *size), -1.0, dtype=torch.bfloat16, device="cuda") for size in SIZES]
    monkeypatch.setattr(slot_layout, "DENSE", (SimpleNamespace,))
    layers = {str(k): SimpleNamespace(lora_a_stacked=(s,), lora_b_stacked=(s + 1,)) for k, s in enumerate(stacks)}
    return slot_layout.SlotLayout(layers)


def image_of(layout: slot_layout.SlotLayout, value: float) -> Image:
    memory = torch.full((layout.numel,), value, dtype=layout.dtype, pin_memory=True)
    return Image(None, Room(memory), Future())


def test_slots_change_behind_the_work_before_and_in_order(layout: slot_layout.SlotLayout) -> None:
    """More images than stages, expected or not, on a busy stream and without a sync: each reader sees its own."""
    loader = StagedLoader(layout, SLOTS)
    images = [image_of(layout, float(k)) for k in range(2 * STAGES + 1)]
    addresses = [part.data_ptr() for part in layout.slot(1)]
    seen = []
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for turn in range(40):
            torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]  # so that every load is queued behind the reads of the one before
            image = images[turn * 3 % len(images)]
            if turn % 2:
                loader.expect([image, images[turn % len(images)]])
            assert loader.load(image, 1) or not turn % 2
            seen.append((image, torch.stack([part.float().mean() for part in layout.slot(1)])))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for image, means in seen:
        assert means.tolist() == [float(image.room.memory[0])] * len(means)
    assert [part.data_ptr() for part in layout.slot(1)] == addresses
    for other in (0, 2):
        assert {float(part.float().mean()) for part in layout.slot(other)} == {-1.0, 0.0}
    assert all(image.room.read.query() for image in images)


@pytest.mark.parametrize("environment", [V1, V2])
def test_texts_through_swaps_in_graphs(environment: dict[str, str], tiny: Tiny, reference: Reference) -> None:
    """Three adapters on one slot, together and in turns: images are used, and V2 waits for the GPU nowhere."""
    batches = [[Ask(prompt(10 * k + j, 6 + 5 * j), "abc"[(j + k) % 3], tokens=16) for j in range(6)] for k in range(8)]
    texts, facts = run_apart(tiny, {}, batches, environment, dtype="bfloat16", max_loras=1, max_cpu_loras=3, **GRAPHS)
    assert_texts(texts, batches, reference)
    ways: dict[str, Any] = {labels["way"]: n for name, labels, n in facts["counts"] if name == "lorazor_swaps_total"}
    assert ways.get("image", 0) + ways.get("prefetched", 0) > ways["stock"]
    assert ways.get("prefetched", 0) > 0
