"""Puts our LoRA wrappers into a loaded model, and hands them each step's adapters as arrays, on either model runner."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
import torch
from vllm.lora.layers import LoRAMappingType
from vllm.lora.model_manager import DEFAULT_LANGUAGE_WRAPPER_KEY

from lorazor.runtime.core import ReleaseCore
from lorazor.runtime.punica import replace_wrappers, use_active_rows
from lorazor.runtime.punica_gpu import KernelPunica
from lorazor.runtime.slot_layout import DENSE
from lorazor.runtime.swaps import Swaps

logger = logging.getLogger("vllm.lorazor")


def kernels_fit(manager: Any) -> bool:
    """Whether the kernels take these adapters: half precision on CUDA. The rest runs in PyTorch (punica.py)."""
    half = manager.lora_config.lora_dtype in (torch.float16, torch.bfloat16)
    return half and torch.device(manager.device).type == "cuda"


def take_over(manager: Any) -> None:
    """Give the LoRA layers of a loaded model our wrappers; call before the model first runs.

    Our kernels serve the dense layers. All others, which today are mixtures of experts, stay with vLLM's kernels.
    """
    if not kernels_fit(manager):
        use_active_rows(manager)
        return
    left = sorted({type(m).__name__ for m in manager.modules.values() if not isinstance(m, DENSE)})
    if left:
        logger.info("LoRazor: LoRA layers that stay on vLLM's own kernels: %s", ", ".join(left))

    def ours(stock: Any) -> KernelPunica:
        # The experts keep the wrapper that they know, so it must be kept up to date.
        mine = [m for m in manager.modules.values() if getattr(m, "punica_wrapper", None) is stock]
        kept = stock if any(not isinstance(m, DENSE) for m in mine) else None
        return KernelPunica(
            stock._token_lora_indices.shape[0], stock._seq_lengths.shape[0], stock.device, manager, kept
        )

    replace_wrappers(manager, ours, DENSE)


def language_wrapper(manager: Any) -> Any:
    """The wrapper of the language model, which is the whole model unless it has other parts (towers, connectors)."""
    key = manager.mm_mapping.language_model[0] if manager.supports_mm else DEFAULT_LANGUAGE_WRAPPER_KEY
    return manager._get_punica_wrapper(key)


class ActiveLoras:
    """For a model runner: vLLM's own `_set_active_loras` without a Python loop over tokens and without a sync."""

    lora_manager: Any
    swaps: Swaps
    core: ReleaseCore
    _applied: set[Any] | frozenset[Any] = frozenset()

    def look_ahead(self, scheduler_output: Any) -> None:
        """Hear from the scheduler which adapters wait for a slot. vLLM's warm-up makes steps without it."""
        if hasattr(scheduler_output, "lorazor"):
            self.swaps.look_ahead(scheduler_output.lorazor.upcoming)

    def _set_active_loras(
        self, rows: Any, tokens: Any, requests: set[Any], mapping_type: Any = LoRAMappingType.LANGUAGE
    ) -> None:
        """Load the step's adapters, then map the sampled `rows` and the `tokens` to them (adapter ids, 0 = none)."""
        began = time.perf_counter()
        wrapper = language_wrapper(self.lora_manager._adapter_manager)
        ours = isinstance(wrapper, KernelPunica) and mapping_type is LoRAMappingType.LANGUAGE
        if ours and wrapper.stock is None:
            self._apply(requests)
        else:
            plain = (tuple(np.asarray(ids).tolist()) for ids in (rows, tokens))
            super()._set_active_loras(*plain, requests, mapping_type)  # type: ignore[misc]
        self._count_swaps(time.perf_counter() - began)
        if ours:
            wrapper.update(np.asarray(tokens, np.int64), np.asarray(rows, np.int64))
        self.swaps.prepare()

    def _apply(self, requests: set[Any]) -> None:
        """vLLM's `_apply_adapters`, which looks at every adapter anew, where something may have changed."""
        active = self.lora_manager._adapter_manager._active_adapters
        same = requests == self._applied and all(r.lora_int_id in active and not r.load_inplace for r in requests)
        if not same:
            self.lora_manager._apply_adapters(requests)
            self._applied = requests

    def add_lora(self, lora_request: Any) -> bool:
        """Load an adapter from its files as they are now, whatever was read ahead."""
        self.swaps.reload(lora_request.lora_int_id)
        return bool(super().add_lora(lora_request))  # type: ignore[misc]

    def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter; it does not come back from a read that is under way."""
        self.swaps.forget(lora_id)
        return bool(super().remove_lora(lora_id))  # type: ignore[misc]

    def _count_swaps(self, seconds: float) -> None:
        swaps = self.swaps.take_counts()
        if swaps:
            with self.core.lock:
                self.core.counters.add("lorazor_swap_microseconds_total", int(1e6 * seconds))
                for way, count in swaps.items():
                    self.core.counters.add("lorazor_swaps_total", count, way=way)
