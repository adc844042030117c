"""Random LoRA layers, activity patterns and the measures that the kernels' tests share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from lorazor.kernels.dispatch import add_lora
from lorazor.kernels.metadata import TileList

MAX_LORAS = 4
# in_features, rank, widths: aligned; ragged everything; unequal slices with a ragged last chunk; rank blocks and chunks
SHAPES = [(64, 16, (256,)), (77, 9, (33, 20)), (1100, 8, (96, 40, 40)), (2080, 80, (136,))]
# Every example on a GPU may compile another variant.
EXAMPLES = 10 if torch.cuda.is_available() else 40
# What each dtype's last bit is worth, doubled: room for another order of additions.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


@dataclass(frozen=True)
class Layer:
    """Inputs and weights of one LoRA layer."""

    y: torch.Tensor
    x: torch.Tensor
    lora_a: list[torch.Tensor]
    lora_b: list[torch.Tensor]

    def to(self, dtype: torch.dtype) -> Layer:
        """The same values in another dtype."""
        lists = [[w.to(dtype) for w in weights] for weights in (self.lora_a, self.lora_b)]
        return Layer(self.y.to(dtype), self.x.to(dtype), lists[0], lists[1])


def dtypes(device: str) -> list[torch.dtype]:
    """What is tested there: the interpreter's bfloat16 is not the GPU's."""
    return [torch.float32, torch.float16] if device == "cpu" else [torch.float16, torch.bfloat16]


def make_layer(
    shape: tuple[int, int, Sequence[int]], rows: int, dtype: torch.dtype, device: str, seed: int = 0
) -> Layer:
    """Random values such that the base's and the adapter's share of y are of like size."""
    in_features, rank, widths = shape
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int, scale: float) -> torch.Tensor:
        return (torch.randn(size, generator=generator) * scale).to(dtype).to(device)

    return Layer(
        y=draw(rows, sum(widths), scale=1.0),
        x=draw(rows, in_features, scale=1.0),
        lora_a=[draw(MAX_LORAS, 1, rank, in_features, scale=in_features**-0.5) for _ in widths],
        lora_b=[draw(MAX_LORAS, 1, width, rank, scale=rank**-0.5) for width in widths],
    )


def tiles_of(slots: Sequence[int], device: str, max_loras: int = MAX_LORAS) -> torch.Tensor:
    """The tile list of one launch over just these rows."""
    listed = TileList(len(slots), max_loras, device)
    listed.copy(np.array(slots, dtype=np.int32))
    return listed.view(len(slots))


def error(out: torch.Tensor, exact: torch.Tensor) -> float:
    """‖out − exact‖ / ‖exact‖ in float64; NaN never compares as small."""
    exact = exact.double()
    return float((out.double() - exact).norm() / exact.norm().clamp_min(1e-30))


def plain_add(layer: Layer, tiles: torch.Tensor) -> torch.Tensor:
    """The reference's answer."""
    return add_lora(layer.y.clone(), layer.x, layer.lora_a, layer.lora_b, tiles, path="reference")


def exact_add(layer: Layer, tiles: torch.Tensor) -> torch.Tensor:
    """The answer in float64 from the layer's own (rounded) inputs."""
    return plain_add(layer.to(torch.float64), tiles)


def patterns(max_rows: int = 40) -> st.SearchStrategy[list[int]]:
    """The slot of each row, −1 where the row holds no adapter."""
    return st.lists(st.integers(-1, MAX_LORAS - 1), min_size=1, max_size=max_rows)
