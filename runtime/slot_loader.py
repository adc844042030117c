"""Slot images on their way into slots.

On CUDA an image goes to a stage, memory on the device, over a copy stream; then one kernel or a few copy it into the
slot on the model's own stream. So a slot changes only behind the steps that were launched before, in place, where
graphs read it, and what takes long can begin while those steps run. Events keep the order; the host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lorazor.runtime.slot_images import Image
from lorazor.runtime.slot_layout import SlotLayout

# Images that can be under way at once; each costs its size on the device.
STAGES = 2


class DirectLoader:
    """On a CPU: an image is copied where it belongs."""

    nbytes = 0

    def __init__(self, layout: SlotLayout, slots: int) -> None:
        self._layout = layout
        self._slots = [layout.slot(k) for k in range(slots)]
        self._expected: list[Image] = []

    def expect(self, images: Sequence[Image]) -> None:
        """These are loaded next."""
        self._expected = list(images)

    @torch.inference_mode()
    def load(self, image: Image, slot: int) -> bool:
        """Fill a slot; returns whether the image had been expected."""
        torch._foreach_copy_(self._slots[slot], self._layout.parts(image.room.memory))
        return image in self._expected


@dataclass(eq=False)
class Stage:
    """An image on the device: `filled` comes after the copy into it, `drained` after the last copy out of it."""

    memory: torch.Tensor
    parts: list[torch.Tensor]
    filled: Any
    drained: Any
    image: Image | None = None


class StagedLoader:
    """On CUDA, as said above."""

    def __init__(self, layout: SlotLayout, slots: int) -> None:
        self._slots = [layout.slot(k) for k in range(slots)]
        self._stream = torch.cuda.Stream(layout.device)  # type: ignore[no-untyped-call]
        memory = [torch.empty(layout.numel, dtype=layout.dtype, device=layout.device) for _ in range(STAGES)]
        # The least recently used first.
        event: Any = torch.cuda.Event
        self._stages = [Stage(m, layout.parts(m), event(), event()) for m in memory]
        self.nbytes = STAGES * layout.nbytes

    def expect(self, images: Sequence[Image]) -> None:
        """Start these on their way to the device: they are loaded next."""
        missing = [image for image in images[:STAGES] if self._touched(image) is None]
        for image in missing:
            self._fill(image)

    @torch.inference_mode()
    def load(self, image: Image, slot: int) -> bool:
        """Fill a slot behind all work launched so far; returns whether the image had been on its way."""
        stage = self._touched(image)
        expected = stage is not None
        stage = stage or self._fill(image)
        stream = torch.cuda.current_stream()
        stream.wait_event(stage.filled)
        torch._foreach_copy_(self._slots[slot], stage.parts)
        stage.drained.record(stream)
        return expected

    def _touched(self, image: Image) -> Stage | None:
        stage = next((stage for stage in self._stages if stage.image is image), None)
        if stage is not None:
            self._stages.remove(stage)
            self._stages.append(stage)
        return stage

    @torch.inference_mode()
    def _fill(self, image: Image) -> Stage:
        stage = self._stages.pop(0)
        self._stages.append(stage)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(stage.drained)
            stage.memory.copy_(image.room.memory, non_blocking=True)
            stage.filled = torch.cuda.Event()  # type: ignore[no-untyped-call]
            stage.filled.record(self._stream)
        stage.image, image.room.read = image, stage.filled
        return stage
