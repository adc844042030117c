"""What benchmarks/kernels.py measures: the LoRA of one step of a Llama-3.1-8B-shaped model, and its least bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LAYERS = 32
# Input features and slice widths of each LoRA module of a layer: qkv, o, gate_up, down.
MODULES = [(4096, (4096, 1024, 1024)), (4096, (4096,)), (4096, (14336, 14336)), (14336, (4096,))]
BYTES_PER_MS = 4.3e9  # what a device-to-device copy reaches on an H200
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Point:
    """`rows` rows over `adapters` adapters of `rank`, one row after the other."""

    adapters: int
    rank: int
    rows: int

    @classmethod
    def parse(cls, text: str) -> Point:
        """From `8x16x128`: adapters, rank, rows."""
        adapters, rank, rows = (int(part) for part in text.split("x"))
        return cls(adapters, rank, rows)

    def slots(self, share: float) -> torch.Tensor:
        """The slot of each row, int32 on the CPU, with `share` of the rows active, drawn with a fixed seed."""
        chosen = torch.randperm(self.rows, generator=torch.Generator().manual_seed(0))[: round(share * self.rows)]
        slots = torch.full((self.rows,), -1, dtype=torch.int32)
        slots[chosen] = (chosen % self.adapters).int()
        return slots

    def least_ms(self, slots: torch.Tensor) -> float:
        """Each active adapter's weights and each active row's input read once, its output read and written once."""
        active = slots[slots >= 0]
        total = 0
        for in_features, widths in MODULES:
            weights = self.rank * (len(widths) * in_features + sum(widths)) * len(active.unique())
            total += 2 * (weights + len(active) * (in_features + 2 * sum(widths)))
        return LAYERS * total / BYTES_PER_MS


@dataclass(frozen=True)
class Module:
    """One LoRA module of one layer, in vLLM's layout; x and y are shared by the layers."""

    x: torch.Tensor
    y: torch.Tensor
    lora_a: list[torch.Tensor]
    lora_b: list[torch.Tensor]


def draw(*size: int, scale: float) -> torch.Tensor:
    """Random normal values on the GPU."""
    return torch.empty(size, dtype=DTYPE, device="cuda").normal_(std=scale)


def make_model(adapters: int, rank: int, rows: int) -> list[Module]:
    """All layers' modules, in order; weights differ by layer, so they do not stay in the cache."""
    xs = [draw(rows, in_features, scale=1.0) for in_features, _ in MODULES]
    ys = [draw(rows, sum(widths), scale=1.0) for _, widths in MODULES]
    model = []
    for _ in range(LAYERS):
        for (in_features, widths), x, y in zip(MODULES, xs, ys, strict=True):
            a = [draw(adapters, 1, rank, in_features, scale=in_features**-0.5) for _ in widths]
            b = [draw(adapters, 1, width, rank, scale=rank**-0.5) for width in widths]
            model.append(Module(x, y, a, b))
    return model
