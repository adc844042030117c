"""Logits of a causal language model where a target token is to be predicted, and nowhere else.

All logits of a batch of 64 x 220 tokens and 152k words are 2^31 numbers: more memory than everything else in training,
and more than some CUDA kernels can index.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lorazor.training.finetune_data import IGNORED

CHUNK = 4096  # tokens whose logits are float32 at a time; below 2^31 numbers for vocabularies up to half a million


class TargetLogits:
    """Has `model`'s head see only the hidden states from which the target tokens, set last, are predicted."""

    def __init__(self, model: Any) -> None:
        head: nn.Module = model.get_output_embeddings()
        self._wanted: Tensor | None = None
        head.register_forward_pre_hook(self._select)

    def set(self, labels: Tensor) -> None:
        """For the next forward passes, whose logits are [n, V], row by row. labels: int64 [batch, tokens]."""
        self._wanted = wanted(labels)

    def clear(self) -> None:
        """All logits from now on, as generation takes them."""
        self._wanted = None

    def _select(self, _module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        return inputs if self._wanted is None else (inputs[0][:, :-1][self._wanted],)


def wanted(labels: Tensor) -> Tensor:
    """bool [batch, tokens - 1]: after which tokens a target token comes."""
    return labels[:, 1:] != IGNORED


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of each token, float32 [n], in nats; logits [n, V], labels int64 [n]."""
    parts = zip(chunks(logits), chunks(labels), strict=True)
    return torch.cat([cross_entropy(part.float(), label, reduction="none") for part, label in parts])


def chunks(tokens: Tensor) -> tuple[Tensor, ...]:
    """Parts of at most CHUNK tokens [n, ...]; the gradients meet in one piece again."""
    return torch.split(tokens, CHUNK)
