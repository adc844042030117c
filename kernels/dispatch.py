"""The one call that a LoRA layer makes: y += (x @ A.T) @ B.T for the active rows, by the kernels or the reference."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from lorazor.kernels import reference
from lorazor.kernels.plan import MAX_SLICES, Plan, plan_for

Path = Literal["triton", "reference"]
Operation = Callable[..., torch.Tensor]


def path_for(device: torch.device) -> Path:
    """Triton on CUDA, the reference elsewhere."""
    return "triton" if device.type == "cuda" else "reference"


def kernels_for(path: Path) -> tuple[Operation, Operation]:
    """Shrink and expand; the kernels are imported at first use, with Triton, which a CPU server does not need."""
    if path == "reference":
        return reference.shrink, reference.expand
    names = ("shrink", "expand")
    return tuple(getattr(importlib.import_module(f"lorazor.kernels.{name}"), name) for name in names)


def add_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a: Sequence[torch.Tensor],
    lora_b: Sequence[torch.Tensor],
    tiles: torch.Tensor,
    *,
    offset: int = 0,
    add: bool = True,
    ranks: torch.Tensor | None = None,
    plan: Plan | None = None,
    path: Path | None = None,
) -> torch.Tensor:
    """Add each active row's adapter output to y, in place; returns y. Two launches for up to three slices.

    Args:
        y: [rows, columns]; slice i covers width_i columns, the slices lie side by side from `offset` on.
        x: [rows, K], of y's dtype.
        lora_a: [max_loras, 1, rank, K] for each slice. lora_b: [max_loras, 1, width_i, rank] for each slice, with the
            adapter's scaling already in it (vLLM multiplies it in when it loads an adapter).
        tiles: the step's tile list, `metadata.TileList`.
        add: False writes the active rows instead of adding to them.
        ranks: int32 [max_loras], each slot's own rank, where ranks are mixed in one buffer; None: all are full.
        plan, path: overrides, for tests and benchmarks.

    Raises:
        ValueError: a shape, stride or dtype does not fit.
    """
    shrink, expand = kernels_for(path or path_for(y.device))
    plan = plan or plan_for(x.shape[0], x.shape[1], lora_a[0].shape[2])
    for first in range(0, len(lora_a), MAX_SLICES):
        some_a, some_b = lora_a[first : first + MAX_SLICES], lora_b[first : first + MAX_SLICES]
        partial = shrink(x, some_a, tiles, ranks=ranks, plan=plan)
        expand(partial, some_b, y, tiles, offset=offset, add=add, ranks=ranks, plan=plan)
        offset += sum(b.shape[2] for b in some_b)
    return y
