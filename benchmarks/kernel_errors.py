"""How far the contestants of benchmarks/kernels.py are from float64, before any of them is timed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf

import torch
from kernel_paths import Contestant
from kernel_points import MODULES, Module

from lorazor.kernels.dispatch import add_lora
from lorazor.kernels.metadata import tiles_numpy

LARGEST = 5e-3  # that anybody may have, relative; two roundings to bfloat16 give about 2e-3


@contextmanager
def poisoned() -> Iterator[None]:
    """Fresh memory is full of NaN, so that a partial sum that is read but was not written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def exact(module: Module, before: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
    """What y must become, in float64."""
    lora_a, lora_b = ([weight.double() for weight in weights] for weights in (module.lora_a, module.lora_b))
    return add_lora(before.double(), module.x.double(), lora_a, lora_b, tiles, path="reference")


def gap(y: torch.Tensor, right: torch.Tensor, before: torch.Tensor, is_active: torch.Tensor) -> float:
    """The relative error of the active rows; infinite if it is not a number or an idle row changed."""
    if not torch.equal(y[~is_active], before[~is_active]):
        return inf
    if not is_active.any():
        return 0.0
    found = float((y[is_active].double() - right[is_active]).norm() / right[is_active].norm())
    return found if found == found else inf


def errors(contestants: dict[str, Contestant], model: list[Module], slots: torch.Tensor) -> dict[str, float]:
    """The largest error of each contestant over one layer's modules.

    The reference has a tile list of its own, from the host: one tile for each active slot, so it takes few launches.
    The output before is the same in every call, so that errors of two calls compare.
    """
    generator = torch.Generator(model[0].y.device).manual_seed(0)
    tiles = torch.from_numpy(tiles_numpy(slots.numpy(), len(model[0].lora_a[0]), block=len(slots))).cuda()
    is_active = (slots >= 0).cuda()
    worst = dict.fromkeys(contestants, 0.0)
    for module in model[: len(MODULES)]:
        before = torch.empty_like(module.y).normal_(generator=generator)
        right = exact(module, before, tiles)
        for name, contestant in contestants.items():
            y = before.clone()
            with poisoned():
                contestant(module, y)
            worst[name] = max(worst[name], gap(y, right, before, is_active))
    return worst


def passing(found: dict[str, float]) -> list[str]:
    """The contestants that are right: none may be further off than stock, where stock takes part."""
    allowed = min(LARGEST, found["stock"] * 1.02 + 1e-5) if "stock" in found else LARGEST
    return [name for name, error in found.items() if error <= allowed]
