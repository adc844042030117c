"""Adapters' slot images in pinned host memory, made in a background thread, as many as the budget holds.

An image belongs to one loaded adapter (vLLM's LoRAModel, by identity): an adapter that was loaded anew has none yet.
All memory is taken at the start, because pinning takes milliseconds and would stall a step.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch

from lorazor.runtime.slot_layout import ImageWriter, SlotLayout

logger = logging.getLogger("vllm.lorazor")

# torch rounds a pinned allocation up to a power of two, so images share blocks of this size.
BLOCK = 1 << 30


@dataclass(eq=False)
class Room:
    """Memory of one image; `read` is the event after its last copy to the device."""

    memory: torch.Tensor
    read: Any = None


@dataclass(eq=False)
class Image:
    """The image of one adapter, complete once `made` is done."""

    model: Any
    room: Room
    made: Future[None]


class SlotImages:
    """For the thread that runs the model; only the writing is done in the background.

    Args:
        count: the most images, also an attribute.
        background: runs jobs one after the other.
        weights_of: an adapter's weights for a layer, from the adapter and the layer's name.
    """

    def __init__(
        self, layout: SlotLayout, count: int, background: Executor, weights_of: Callable[[Any, str], Any]
    ) -> None:
        self.count = count
        self._writer, self._background, self._weights_of = ImageWriter(layout), background, weights_of
        self._free = [Room(memory) for memory in _memory(layout, count)]
        self._images: OrderedDict[int, Image] = OrderedDict()
        self._works = True

    def get(self, lora_id: int, model: Any) -> Image | None:
        """The image of this adapter if it is complete."""
        image = self._images.get(lora_id)
        if image is None or image.model() is not model or not image.made.done():
            return None
        if image.made.exception() is not None:
            self._fail(image.made.exception())
            return None
        self._images.move_to_end(lora_id)
        return image

    def make(self, lora_id: int, model: Any) -> None:
        """Start to make the image of this adapter, unless it is there or being made."""
        image = self._images.get(lora_id)
        if not self._works or (image is not None and (image.model() is model or not image.made.done())):
            return
        if image is not None:
            self._free.append(self._images.pop(lora_id).room)
        room = self._take_room()
        if room is not None:
            self._images[lora_id] = Image(ref(model), room, self._background.submit(self._write, room, model))

    def _take_room(self) -> Room | None:
        if self._free:
            return self._free.pop()
        made = [lora_id for lora_id, image in self._images.items() if image.made.done()]
        # Those of adapters that vLLM no longer holds go first, then those least recently used.
        gone = [lora_id for lora_id in made if self._images[lora_id].model() is None]
        return self._images.pop((gone or made)[0]).room if made else None

    def _write(self, room: Room, model: Any) -> None:
        while room.read is not None and not room.read.query():
            time.sleep(0.001)
        self._writer.write(room.memory, lambda name: self._weights_of(model, name))

    def _fail(self, why: BaseException | None) -> None:
        self._works = False
        self._images.clear()
        logger.error("LoRazor: slot images failed and are switched off; vLLM activates adapters", exc_info=why)


def _memory(layout: SlotLayout, count: int) -> list[torch.Tensor]:
    together = max(1, BLOCK // layout.nbytes)
    blocks = [min(together, count - first) for first in range(0, count, together)]
    pinned = layout.device.type == "cuda"
    return [
        image
        for images in blocks
        for image in torch.empty(images, layout.numel, dtype=layout.dtype, device="cpu", pin_memory=pinned)
    ]
