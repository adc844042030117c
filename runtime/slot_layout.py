"""An adapter slot as one flat piece of memory, its image: every stacked LoRA weight's part of that slot, end to end."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from vllm.lora.layers import LogitsProcessorWithLoRA, VocabParallelEmbeddingWithLoRA
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

# Layers that keep all their adapter weights in lora_a_stacked and lora_b_stacked, slots first.
DENSE = (BaseLinearLayerWithLoRA, VocabParallelEmbeddingWithLoRA, LogitsProcessorWithLoRA)
# Parts start at multiples of this many elements, so that copies are vectorised.
ALIGNED = 16


def stacks_of(module: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A LoRA layer's stacked weights A and B, a tensor [slots, ...] for each slice of its output."""
    a, b = module.lora_a_stacked, module.lora_b_stacked
    return ([a], [b]) if isinstance(a, torch.Tensor) else (list(a), list(b))


class SlotLayout:
    """Where each part of a slot lies in an image.

    Attributes:
        numel: elements of an image.
        dtype, device: of the weights.
    """

    def __init__(self, modules: Mapping[str, Any]) -> None:
        """`modules`: vLLM's LoRA layers by name.

        Raises:
            ValueError: layers whose weights do not all lie in such stacks, named.
        """
        others = sorted({type(m).__name__ for m in modules.values() if not isinstance(m, DENSE)})
        if others or not modules:
            raise ValueError(f"LoRA layers {', '.join(others) or 'are missing'}")
        self.modules = dict(modules)
        self._stacks = [stack for m in modules.values() for part in stacks_of(m) for stack in part]
        kinds = {(stack.dtype, stack.device) for stack in self._stacks}
        if len(kinds) > 1 or not all(stack.is_contiguous() for stack in self._stacks):
            raise ValueError("LoRA weights of different types")
        self.dtype, self.device = kinds.pop()
        self._places: list[int] = []
        self.numel = 0
        for stack in self._stacks:
            self._places.append(self.numel)
            self.numel += -(-stack[0].numel() // ALIGNED) * ALIGNED

    @property
    def nbytes(self) -> int:
        """Bytes of an image."""
        return self.numel * self.dtype.itemsize

    def parts(self, image: torch.Tensor) -> list[torch.Tensor]:
        """The parts of an image [numel], each in the shape that it has in a slot."""
        places = zip(self._stacks, self._places, strict=True)
        return [image[at : at + stack[0].numel()].view(stack.shape[1:]) for stack, at in places]

    def slot(self, index: int) -> list[torch.Tensor]:
        """The parts of a slot of the model, in the same order."""
        return [stack[index] for stack in self._stacks]


class ImageWriter:
    """Writes images with the layers' own `set_lora`, on copies of the layers whose only slot is the image.

    How a layer slices an adapter (packed projections, tensor parallelism, sharded ranks) is its class's matter.
    """

    def __init__(self, layout: SlotLayout) -> None:
        self._layout = layout
        self._layers = {name: copy.copy(module) for name, module in layout.modules.items()}

    @torch.inference_mode()
    def write(self, image: torch.Tensor, weights_of: Callable[[str], Any]) -> None:
        """Fill an image on the host; `weights_of(name)` is an adapter's weights for a layer, or None."""
        parts = iter([part.unsqueeze(0) for part in self._layout.parts(image)])
        for name, layer in self._layers.items():
            a, b = ([next(parts) for _ in stacks] for stacks in stacks_of(self._layout.modules[name]))
            single = isinstance(layer.lora_a_stacked, torch.Tensor)
            vars(layer).update(lora_a_stacked=a[0] if single else a, lora_b_stacked=b[0] if single else b)
            weights = weights_of(name)
            if weights:
                layer.set_lora(0, weights.lora_a, weights.lora_b)
            else:
                layer.reset_lora(0)
