"""Puts our LoRA wrappers into a loaded model, and hands them each step's adapters as arrays, on either model runner."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from vllm.lora.layers import LogitsProcessorWithLoRA, LoRAMappingType, VocabParallelEmbeddingWithLoRA
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.model_manager import DEFAULT_LANGUAGE_WRAPPER_KEY

from lorazor.runtime.punica import replace_wrappers, use_active_rows
from lorazor.runtime.punica_gpu import KernelPunica

logger = logging.getLogger("vllm.lorazor")

# The layers that our kernels serve. All others, which today are the mixture-of-experts ones, stay with vLLM's kernels.
DENSE = (BaseLinearLayerWithLoRA, VocabParallelEmbeddingWithLoRA, LogitsProcessorWithLoRA)


def kernels_fit(manager: Any) -> bool:
    """Whether the kernels take these adapters: half precision on CUDA. The rest runs in PyTorch (punica.py)."""
    half = manager.lora_config.lora_dtype in (torch.float16, torch.bfloat16)
    return half and torch.device(manager.device).type == "cuda"


def take_over(manager: Any) -> None:
    """Give the LoRA layers of a loaded model our wrappers; call before the model first runs."""
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

    def _set_active_loras(
        self, rows: Any, tokens: Any, requests: set[Any], mapping_type: Any = LoRAMappingType.LANGUAGE
    ) -> None:
        """Load the step's adapters, then map the sampled `rows` and the `tokens` to them (adapter ids, 0 = none)."""
        wrapper = language_wrapper(self.lora_manager._adapter_manager)
        ours = isinstance(wrapper, KernelPunica) and mapping_type is LoRAMappingType.LANGUAGE
        if ours and wrapper.stock is None:
            self.lora_manager._apply_adapters(requests)
        else:
            plain = (tuple(np.asarray(ids).tolist()) for ids in (rows, tokens))
            super()._set_active_loras(*plain, requests, mapping_type)  # type: ignore[misc]
        if ours:
            wrapper.update(np.asarray(tokens, np.int64), np.asarray(rows, np.int64))
