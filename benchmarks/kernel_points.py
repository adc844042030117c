"""What benchmarks/kernels.py measures: the LoRA of one step of a Llama-3.1-8B-shaped model, and its least bytes.

A point is written adapters x rank x rows: `8x16x128` is 128 rows over 8 adapters of rank 16. Mixed ranks are joined by
plus signs: in `24x8+16+64x128` the slots cycle over the ranks 8, 16 and 64, in buffers of rank 64 whose columns past a
slot's own rank are zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

LAYERS = 32
# Input features and slice widths of each LoRA module of a layer: qkv, o, gate_up, down.
MODULES = [(4096, (4096, 1024, 1024)), (4096, (4096,)), (4096, (14336, 14336)), (14336, (4096,))]
BYTES_PER_MS = 4.3e9  # what a device-to-device copy reaches on an H200
DTYPE = torch.bfloat16
# The grid, what matters most first; prefills are over few adapters.
FIRST = ["8x16", "32x16", "16x64"]
OTHERS = ["1x16", "32x8", "8x128", "64x16", "24x8+16+64"]
PREFILLS = ["4x16x2048", "4x16x8192"]

Weights = list[torch.Tensor]


def grid() -> list[str]:
    """The default points, in the order in which they are measured."""
    small = [f"{config}x{rows}" for rows in (1, 8, 32, 256) for config in FIRST + OTHERS]
    return [f"{config}x128" for config in FIRST] + PREFILLS + [f"{config}x128" for config in OTHERS] + small


@dataclass(frozen=True)
class Point:
    """`rows` rows over `adapters` adapters whose ranks cycle over `ranks`, one row after the other."""

    adapters: int
    ranks: tuple[int, ...]
    rows: int

    @classmethod
    def parse(cls, text: str) -> Point:
        """From `8x16x128` or `24x8+16+64x128`. Raises ValueError for anything else."""
        adapters, ranks, rows = text.split("x")
        return cls(int(adapters), tuple(int(rank) for rank in ranks.split("+")), int(rows))

    @property
    def rank_text(self) -> str:
        """`16`, or `8+16+64`."""
        return "+".join(map(str, self.ranks))

    def __str__(self) -> str:
        return f"{self.adapters}x{self.rank_text}x{self.rows}"

    def own_ranks(self) -> torch.Tensor:
        """The rank of each slot, int32 on the CPU."""
        return torch.tensor([self.ranks[i % len(self.ranks)] for i in range(self.adapters)], dtype=torch.int32)

    def actives(self, shares: Sequence[float]) -> dict[int, float]:
        """The numbers of active rows to measure, each once, with the share; one that rounds to no row is 0 %."""
        found: dict[int, float] = {}
        for share in shares:
            active = round(share * self.rows)
            found.setdefault(active, share if active else 0.0)
        return found

    def slots(self, active: int) -> torch.Tensor:
        """The slot of each row, int32 on the CPU, -1 but for `active` rows that are drawn with a fixed seed."""
        chosen = torch.randperm(self.rows, generator=torch.Generator().manual_seed(0))[:active]
        slots = torch.full((self.rows,), -1, dtype=torch.int32)
        slots[chosen] = (chosen % self.adapters).int()
        return slots

    def least_ms(self, slots: torch.Tensor) -> float:
        """Each active adapter's weights (of its own rank) and each active row's input read once, its output read and
        written once."""
        active = slots[slots >= 0]
        ranks = sum(self.ranks[slot % len(self.ranks)] for slot in set(active.tolist()))
        total = 0
        for in_features, widths in MODULES:
            weights = ranks * (len(widths) * in_features + sum(widths))
            total += 2 * (weights + len(active) * (in_features + 2 * sum(widths)))
        return LAYERS * total / BYTES_PER_MS


@dataclass(frozen=True)
class Module:
    """One LoRA module of one layer, in vLLM's layout; x and y are shared by the layers."""

    x: torch.Tensor
    y: torch.Tensor
    lora_a: Weights
    lora_b: Weights


def draw(*size: int, scale: float) -> torch.Tensor:
    """Random normal values on the GPU."""
    return torch.empty(size, dtype=DTYPE, device="cuda").normal_(std=scale)


@cache
def make_weights(adapters: int, ranks: tuple[int, ...]) -> list[tuple[Weights, Weights]]:
    """A and B of all layers' modules, different in each layer, so that they do not stay in the cache.

    All points of a configuration share them, and they are kept: 30 GB for the whole grid. (So no address is used twice,
    which vLLM, keeping strides by address, would take for the same weights.)
    """
    rank, own = max(ranks), Point(adapters, ranks, 1).own_ranks().cuda()
    filled = (torch.arange(rank, device="cuda") < own[:, None]).to(DTYPE)[:, None, :]
    weights = []
    for in_features, widths in MODULES * LAYERS:
        a = [draw(adapters, 1, rank, in_features, scale=in_features**-0.5) for _ in widths]
        b = [draw(adapters, 1, width, rank, scale=rank**-0.5) for width in widths]
        if len(ranks) > 1:
            for some_a, some_b in zip(a, b, strict=True):
                some_a.mul_(filled[..., None])
                some_b.mul_(filled[:, :, None, :])
        weights.append((a, b))
    return weights


def make_model(point: Point) -> list[Module]:
    """All layers' modules, in order."""
    xs = [draw(point.rows, in_features, scale=1.0) for in_features, _ in MODULES]
    ys = [draw(point.rows, sum(widths), scale=1.0) for _, widths in MODULES]
    weights = make_weights(point.adapters, point.ranks)
    return [Module(x, y, *some) for x, y, some in zip(xs * LAYERS, ys * LAYERS, weights, strict=True)]
