"""vLLM's LoRA interface over the active-row kernels; see `lora_op.py` for what runs and when.

Everything that depends on the step is in device buffers at fixed addresses, written in stream order before the forward
pass: the tile lists, each slot's own rank, and the rows that an embedding adapter looks up.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.lora.layers import LogitsProcessorWithLoRA, VocabParallelEmbeddingWithLoRA
from vllm.lora.punica_wrapper.punica_base import PunicaWrapperBase

from lorazor.runtime.lora_op import ActiveRows, add_linear, add_lora_op, expand_op, shrink_op
from lorazor.runtime.slots import Slots, rank_bound, slots_of, to_device

logger = logging.getLogger("vllm.lorazor")


class KernelPunica(PunicaWrapperBase):
    """One wrapper's step and the calls of its layers.

    Args:
        manager: vLLM's LoRA model manager, which knows what lies in each slot.
        stock: vLLM's own wrapper, kept up to date for layers that stay with it; None where there are none.
    """

    def __init__(self, max_tokens: int, max_samples: int, device: Any, manager: Any, stock: Any = None) -> None:
        super().__init__(max_tokens, max_samples, device)
        self.manager, self.stock = manager, stock
        slots, self._full_rank = manager.lora_config.max_loras, manager.lora_config.max_lora_rank
        ranks = torch.full((slots,), self._full_rank, dtype=torch.int32, device=device)
        self.tokens = ActiveRows(max_tokens, slots, ranks, self._full_rank)
        self.samples = ActiveRows(max_samples, slots, ranks, self._full_rank)
        self.key = self.tokens.key
        # Graph padding reads past the step's tokens.
        self._embeddings_indices.zero_()
        self._embedding = any(isinstance(m, VocabParallelEmbeddingWithLoRA) for m in manager.modules.values())
        self._heads = [n for n, m in manager.modules.items() if isinstance(m, LogitsProcessorWithLoRA)]
        self._models: list[Any] = [None] * slots
        self._has_head = np.zeros(slots, np.bool_)
        self._token_slots = self._sample_slots = np.zeros(0, np.int32)
        self._sampled = 0
        self._told_of_rows = False

    # ------------------------------------------------------------------ before the forward pass
    def update_metadata(self, mapping: Any, lora_index_to_id: Any, max_loras: int, vocab_size: int, **_: Any) -> None:
        """Take a step from vLLM's own hooks, dummy runs and captures among them."""
        if self.stock is not None:
            self.stock.update_metadata(mapping, lora_index_to_id, max_loras, vocab_size)
        self.update(np.asarray(mapping.index_mapping, np.int64), np.asarray(mapping.prompt_mapping, np.int64))

    def update(self, token_ids: NDArray[np.integer[Any]], sample_ids: NDArray[np.integer[Any]]) -> None:
        """Take a step: the adapter id of every token and of every sampled row, below 1 = none. Call it every step."""
        self._look_at_slots()
        slot_ids = self.manager.lora_index_to_id
        self._set_tokens(slots_of(token_ids, slot_ids))
        self._set_samples(slots_of(sample_ids, slot_ids))

    def _look_at_slots(self) -> None:
        # Adapters by identity: one that was loaded anew may sit in its old slot, under its old id, with another rank.
        registered = self.manager._registered_adapters.cache
        models = [registered.get(lora_id) for lora_id in self.manager.lora_index_to_id]
        if all(new is old for new, old in zip(models, self._models, strict=True)):
            return
        self._models = models
        ranks = [self._full_rank if model is None else rank_bound(model, self._full_rank) for model in models]
        to_device(self.tokens.ranks, np.array(ranks, np.int32))
        self._has_head = np.array([model is not None and self._has_head_weights(model) for model in models])

    def _has_head_weights(self, model: Any) -> bool:
        return any(self.manager._get_lora_layer_weights(model, name) is not None for name in self._heads)

    def _set_tokens(self, slots: Slots) -> None:
        if np.array_equal(slots, self._token_slots):
            return
        self._token_slots = slots
        self.tokens.nobody = not (slots >= 0).any()
        self.tokens.tiles.copy(slots)
        if self._embedding:
            first_row = np.maximum(slots, 0).astype(np.int64) * self.manager.vocab_size
            to_device(self._embeddings_indices[1, : len(slots)], first_row)

    def _set_samples(self, slots: Slots) -> None:
        # Only adapters with weights for the head: most have none, and then logits cost nothing. Logits are taken
        # outside graphs, so a list that nobody is in need not be written.
        slots = np.where((slots >= 0) & self._has_head[slots], slots, -1).astype(np.int32)
        self._sampled = len(slots)
        self.samples.nobody = not (slots >= 0).any()
        if not self.samples.nobody and not np.array_equal(slots, self._sample_slots):
            self._sample_slots = slots
            self.samples.tiles.copy(slots)

    # ------------------------------------------------------------------ what layers call
    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: Sequence[torch.Tensor],
        lora_b_stacked: Sequence[torch.Tensor],
        scale: float,
        output_slices: Sequence[int],
        *,
        add_inputs: bool = True,
        **_: Any,
    ) -> None:
        """y[:, slice i] += (x @ A[i].T) @ B[i].T for each slice i; `add_inputs=False` writes the active rows."""
        _unscaled(scale)
        add_lora_op(y, x, list(lora_a_stacked), list(lora_b_stacked), self.key, add_inputs)

    def add_shrink(
        self, y: torch.Tensor, x: torch.Tensor, lora_a_stacked: Sequence[torch.Tensor], scale: float, **_: Any
    ) -> None:
        """y[i] = x @ A[i].T for the active rows (fully sharded layers; y is then gathered or summed over ranks)."""
        _unscaled(scale)
        shrink_op(y, x, list(lora_a_stacked), self.key)

    def add_expand(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_b_stacked: Sequence[torch.Tensor],
        output_slices: Sequence[int],
        offset_start: int = 0,
        add_inputs: bool = True,
        **_: Any,
    ) -> None:
        """y[:, slice i] += x[i] @ B[i].T for each slice i, the first one at `offset_start`."""
        expand_op(y, x, list(lora_b_stacked), self.key, offset_start, add_inputs)

    def add_lora_embedding(
        self, y: torch.Tensor, x: torch.Tensor, lora_b_stacked: torch.Tensor, add_inputs: bool = True, **_: Any
    ) -> None:
        """y += x @ B.T, where x already is the row of A that the token selects."""
        expand_op(y, x.unsqueeze(0), [lora_b_stacked], self.key, 0, add_inputs)

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        **_: Any,
    ) -> None:
        """y += (x @ A.T) @ B.T over the sampled rows. vLLM calls it outside compiled code and graphs."""
        _unscaled(scale)
        if self.samples.nobody:
            return
        if x.numel() // x.shape[-1] != self._sampled:
            # Prompt logprobs; stock gives these rows the adapters of other rows.
            if not self._told_of_rows:
                self._told_of_rows = True
                logger.warning("LoRazor: prompt logprobs are taken without the adapters' lm_head (logged once)")
            return
        add_linear(self.samples, y, x, [lora_a_stacked], [lora_b_stacked])


def _unscaled(scale: float) -> None:
    """vLLM multiplies an adapter's scaling into B when it loads it; its layers pass 1."""
    if scale != 1.0:
        raise ValueError(f"scale must be 1.0, got {scale}")
