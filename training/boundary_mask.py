"""The boundary rule for a PEFT model: a token at position p uses the adapter if and only if p < its row's boundary.

The rule acts on the output of each LoRA branch, so it trains (the gradient flows through the keys and values that the
adapter wrote before the boundary) and decodes alike.
"""

from typing import Any

from torch import Tensor, nn


class BoundaryMask:
    """Multiplies what `model`'s LoRA branches add, per token, by the mask that was set last."""

    def __init__(self, model: nn.Module) -> None:
        branches = [module for name, module in model.named_modules() if name.endswith("lora_B.default")]
        if not branches:
            raise ValueError("the model holds no LoRA adapter named 'default'")
        self._mask: Tensor | None = None
        for branch in branches:
            branch.register_forward_hook(self._apply)

    def set(self, positions: Tensor, boundaries: Tensor) -> None:
        """For the next forward passes. positions: int64 [batch, tokens]; boundaries: int64 [batch]."""
        self._mask = (positions < boundaries[:, None]).unsqueeze(-1)

    def clear(self) -> None:
        """Every token uses the adapter from now on."""
        self._mask = None

    def _apply(self, _module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        return output if self._mask is None else output * self._mask
