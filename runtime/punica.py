"""LoRA in PyTorch for the active rows only; a row without an adapter is neither read nor written.

Stock CPU kernels gather a whole weight matrix per token and take index -1 (no adapter) for the last slot's adapter, so
a released row would run on with somebody's adapter; stock CUDA kernels have no float32. Here each resident adapter
multiplies its own rows:

    for slot, rows in groups:
        y[rows] += (x[rows] @ A[slot].T) @ B[slot].T
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_base import PunicaWrapperBase

Groups = list[tuple[int, torch.Tensor]]


def group_rows(indices: torch.Tensor) -> Groups:
    """Rows by adapter slot: [-1, 0, 2, 0] -> [(0, rows [1, 3]), (2, rows [2])]; -1 is in no group."""
    return [(int(s), (indices == s).nonzero().squeeze(1)) for s in torch.unique(indices) if s >= 0]


def add_rows(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, groups: Groups, start: int = 0) -> None:
    """y[rows, start : start + out] += x[rows] @ weight[slot].T for each group.

    Args:
        y: [n, m], changed in place.
        x: [n, in].
        weight: one matrix per slot, [slots, 1, out, in] or [slots, out, in].
    """
    for slot, rows in groups:
        matrix = weight[slot].reshape(weight.shape[-2:])
        width = min(matrix.shape[0], y.shape[1] - start)  # vLLM pads the vocabulary of some layers
        y[rows, start : start + width] += (x[rows].to(matrix.dtype) @ matrix[:width].T).to(y.dtype)


class ActiveRowPunica(PunicaWrapperBase):
    """vLLM's LoRA interface over grouped matrix products; the grouping is made once a step."""

    def update_metadata(self, mapping: Any, lora_index_to_id: Any, max_loras: int, vocab_size: int, **_: Any) -> None:
        """Take the step's mapping of tokens and sampled rows to adapters."""
        self._update_base_metadata(mapping, lora_index_to_id, max_loras, vocab_size)
        self._token_groups = group_rows(self.token_lora_indices)
        self._sampler_groups = group_rows(self.sampler_indices)

    def add_shrink(self, y: Any, x: torch.Tensor, lora_a_stacked: Any, scale: float, **_: Any) -> None:
        """y[i] += (x @ A[i].T) * scale, for each slice i."""
        x = x.reshape(-1, x.shape[-1])
        for out, a in zip(y, lora_a_stacked, strict=True):
            add_rows(out, x * scale, a, self._token_groups)

    def add_expand(
        self,
        y: torch.Tensor,
        x: Any,
        lora_b_stacked: Any,
        output_slices: Sequence[int],
        offset_start: int = 0,
        **_: Any,
    ) -> None:
        """y[:, slice i] += x[i] @ B[i].T, for each slice i."""
        flat = y.view(-1, y.shape[-1])
        for part, b, width in zip(x, lora_b_stacked, output_slices, strict=True):
            add_rows(flat, part, b, self._token_groups, offset_start)
            offset_start += width

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: Any,
        lora_b_stacked: Any,
        scale: float,
        output_slices: Sequence[int],
        **_: Any,
    ) -> None:
        """y[:, slice i] += (x @ A[i].T) @ B[i].T * scale, for each slice i, active rows only."""
        flat, inputs = y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])
        for slot, rows in self._token_groups:
            active, start = inputs[rows], 0
            delta = torch.cat(
                [
                    (active @ a[slot, 0].T) @ b[slot, 0].T * scale
                    for a, b in zip(lora_a_stacked, lora_b_stacked, strict=True)
                ],
                dim=1,
            )
            flat[rows, start : start + delta.shape[1]] += delta

    def add_lora_embedding(self, y: torch.Tensor, x: torch.Tensor, lora_b_stacked: Any, **_: Any) -> None:
        """y += x @ B.T, where x already is the row of A that the token selects."""
        add_rows(y, x, lora_b_stacked, self._token_groups)

    def add_lora_logits(
        self, y: torch.Tensor, x: torch.Tensor, lora_a_stacked: Any, lora_b_stacked: Any, scale: float, **_: Any
    ) -> None:
        """y += (x @ A.T) @ B.T * scale over the sampled rows."""
        flat, inputs = y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])
        low = inputs.new_zeros(inputs.shape[0], lora_b_stacked.shape[-1])
        add_rows(low, inputs * scale, lora_a_stacked, self._sampler_groups)
        add_rows(flat, low, lora_b_stacked, self._sampler_groups)


def replace_wrappers(manager: Any, make: Callable[[Any], Any], layers: Any = object) -> None:
    """Swap each stock wrapper for `make(stock)`, in the manager and in its layers of the classes `layers`."""
    made: dict[int, Any] = {}
    stocks = list(manager.punica_wrapper_mapping.items())  # also keeps the ids from being used again
    for key, stock in stocks:
        if id(stock) not in made:
            made[id(stock)] = make(stock)
        manager.punica_wrapper_mapping[key] = made[id(stock)]
    for module in manager.modules.values():
        ours = made.get(id(getattr(module, "punica_wrapper", None)))
        if ours is not None and isinstance(module, layers):
            module.set_mapping(ours)


def use_active_rows(manager: Any) -> None:
    """Swap every LoRA layer's wrapper for the one above."""
    replace_wrappers(
        manager,
        lambda stock: ActiveRowPunica(stock._token_lora_indices.shape[0], stock._seq_lengths.shape[0], stock.device),
    )
