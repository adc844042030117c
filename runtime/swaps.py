"""Adapters swapped into slots without stalling the step.

vLLM activates an adapter in the middle of a step: it reads the files if it does not hold them, then fills the slot with
hundreds of small copies. Here the slot's image (slot_images.py) is made in the background once and loaded in a few
copies (slot_loader.py), and the scheduler says which adapters wait for a slot, so that files are read and images are on
their way before a slot is free. A step never waits for any of that: what is not ready, vLLM does as ever.

A slot's content is the same either way, so ranks of a tensor-parallel engine need not agree on the way.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import psutil  # type: ignore[import-untyped]

from lorazor.runtime.adapter_reader import AdapterReader
from lorazor.runtime.slot_images import Image, SlotImages
from lorazor.runtime.slot_layout import SlotLayout
from lorazor.runtime.slot_loader import STAGES, DirectLoader, StagedLoader

logger = logging.getLogger("vllm.lorazor")

# Adapters read at once: the images of those that are next are made by the same thread.
READS = 2
# Host memory for images, over all workers of this machine.
MOST_BYTES, MOST_SHARE = 16 << 30, 0.25


class Swaps:
    """Takes over `activate_adapter` of a loaded model's LoRA manager.

    Attributes:
        nbytes: device memory that it takes.
    """

    def __init__(self, lora_manager: Any, workers: int) -> None:
        """`lora_manager`: vLLM's manager of the worker's adapters; `workers`: how many share this machine."""
        self._manager = lora_manager._adapter_manager
        self._stock = self._manager.activate_adapter
        self._manager.activate_adapter = self._activate
        self._background = ThreadPoolExecutor(1, thread_name_prefix="lorazor-adapters")
        self._reader = AdapterReader(lora_manager, self._background)
        self._upcoming: Sequence[Any] = ()
        self._read_ahead: set[int] = set()
        self._serving = False
        self._done: Counter[str] = Counter()
        self._images: SlotImages | None = None
        self.nbytes = 0
        self._set_up(workers)

    def _set_up(self, workers: int) -> None:
        manager = self._manager
        if manager.capacity <= manager.lora_slots:
            return  # what leaves its slot leaves the host, too
        try:
            layout = SlotLayout(manager.modules)
        except ValueError as error:
            logger.info("LoRazor: %s: vLLM alone swaps adapters", error)
            return
        budget = min(MOST_BYTES, MOST_SHARE * psutil.virtual_memory().available) / workers
        count = min(manager.capacity, int(budget / layout.nbytes))
        if not count:
            logger.info("LoRazor: no host memory for slot images of %d bytes: vLLM alone swaps adapters", layout.nbytes)
            return
        self._images = SlotImages(layout, count, self._background, manager._get_lora_layer_weights)
        loader = StagedLoader if layout.device.type == "cuda" else DirectLoader
        self._loader: Any = loader(layout, manager.lora_slots)
        self.nbytes = self._loader.nbytes

    # ------------------------------------------------------------------ a step
    def look_ahead(self, upcoming: Sequence[Any]) -> None:
        """The adapters (LoRARequests) that wait for a slot, the next one first."""
        self._upcoming, self._serving = upcoming, True

    def _activate(self, lora_id: int) -> bool:
        """For vLLM, in place of `activate_adapter`."""
        manager = self._manager
        if lora_id in manager._active_adapters:
            return bool(self._stock(lora_id))
        self._read_ahead.discard(lora_id)
        model = manager._registered_adapters[lora_id]
        image = self._images.get(lora_id, model) if self._images is not None else None
        if image is None:
            self._stock(lora_id)
            way = "stock"
        else:
            expected = self._loader.load(image, self._take_slot(lora_id))
            way = "prefetched" if expected else "image"
        if self._serving:  # the adapters of vLLM's warm-up are not worth an image
            self._done[way] += 1
            if image is None and self._images is not None:
                self._images.make(lora_id, model)
        return True

    def _take_slot(self, lora_id: int) -> int:
        manager = self._manager
        if len(manager._active_adapters) >= manager.lora_slots:
            manager._active_adapters.remove_oldest()
        slot: int = manager.lora_index_to_id.index(None)
        manager._active_adapters[lora_id] = None
        manager.lora_index_to_id[slot] = lora_id
        return slot

    def prepare(self) -> None:
        """Bring the adapters that wait for a slot nearer; call it when the step's own adapters are in their slots."""
        manager, images = self._manager, self._images
        if images is None or not self._upcoming:
            return
        # So many can be held beside the step's own.
        room = min(images.count, manager.capacity - manager.lora_slots)
        waiting = [r for r in self._upcoming if r.lora_int_id not in manager._active_adapters and not r.load_inplace]
        found = [self._image_of(request.lora_int_id) for request in waiting[:room]]
        self._loader.expect([image for image in found[:STAGES] if image is not None])
        self._reader.read(islice((r for r in waiting[:room] if not self._held(r.lora_int_id)), READS))
        for model in self._reader.done():
            self._take_in(model)

    def _image_of(self, lora_id: int) -> Image | None:
        """The image of an adapter that waits for a slot, or None: one that the host holds is begun if it is not there,
        and the adapter is among the last to leave the host."""
        if self._images is None or not self._held(lora_id):
            return None
        model = self._manager._registered_adapters[lora_id]
        self._images.make(lora_id, model)
        return self._images.get(lora_id, model)

    def _held(self, lora_id: int) -> bool:
        return lora_id in self._manager._registered_adapters

    def _take_in(self, model: Any) -> None:
        # The least recently used one is none of the step's or of those waiting: they are fewer than can be held.
        if len(self._manager) >= self._manager.capacity:
            self._manager.remove_oldest_adapter()
        self._manager.add_adapter(model)
        self._read_ahead.add(model.id)

    def forget(self, lora_id: int) -> None:
        """This adapter is about to be unloaded."""
        self._reader.forget(lora_id)
        self._read_ahead.discard(lora_id)

    def reload(self, lora_id: int) -> None:
        """This adapter is about to be loaded on demand: one that was only read ahead may be of other files."""
        if lora_id in self._read_ahead:
            self._manager.remove_adapter(lora_id)
        self.forget(lora_id)

    def take_counts(self) -> dict[str, int]:
        """How many adapters went into slots since the last call, by the way they went."""
        counts, self._done = self._done, Counter()
        return dict(counts)
