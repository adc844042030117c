"""Reads the files of adapters that wait for a slot in a background thread, so that no step waits for a disk."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import nullcontext
from typing import Any

import torch

logger = logging.getLogger("vllm.lorazor")


class AdapterReader:
    """For the thread that runs the model, and alone changes what vLLM holds."""

    def __init__(self, lora_manager: Any, background: Executor) -> None:
        """`lora_manager`: vLLM's manager of the worker's adapters."""
        self._lora_manager, self._background = lora_manager, background
        self._reading: dict[int, Future[Any]] = {}

    def read(self, requests: Iterable[Any]) -> None:
        """Read these adapters (LoRARequests), and forget all others. One that cannot be read is not tried again as
        long as it is asked for: the step that needs it says what is wrong."""
        wanted = {request.lora_int_id: request for request in requests}
        for lora_id in self._reading.keys() - wanted.keys():
            self.forget(lora_id)
        for lora_id, request in wanted.items():
            if lora_id not in self._reading:
                self._reading[lora_id] = self._background.submit(self._read, request)

    def _read(self, request: Any) -> Any:
        manager = self._lora_manager._adapter_manager
        # Pinning memory in a new thread would otherwise start on the first GPU.
        device = torch.device(manager.device)
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            model = self._lora_manager._load_adapter(request)
            # vLLM does this when it takes the adapter in. It takes long, touches the adapter alone, and finds nothing
            # left to do the second time.
            manager._create_merged_loras_inplace(model)
        return model

    def done(self) -> Iterator[Any]:
        """The adapters (LoRAModels) that were read since the last call."""
        for lora_id in [i for i, future in self._reading.items() if future.done() and not future.exception()]:
            yield self._reading.pop(lora_id).result()

    def forget(self, lora_id: int) -> None:
        """What is being read of this adapter is not wanted any more."""
        future = self._reading.pop(lora_id, None)
        if future is not None:
            future.cancel()
