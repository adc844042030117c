"""What both launchers share: checks, slices as three arguments, and what the device can do.

A launch has a fixed number of programs, which share the units of work of the tiles in use, so one captured launch
serves every pattern and an empty tile costs next to nothing.

Programmatic dependent launch (PDL): a kernel may start while the one before it still runs, and waits only where it
first reads what that one wrote. Ours load their tile and their weights before the wait. Two rules keep that
right: program 0 waits even if it has no work (else a kernel could end before its predecessor, and its successor would
read too early); and at least one kernel or copy lies between the last write of the tile list and the first shrink that
reads it (in a model the embedding does; a captured graph's start does as well).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from lorazor.kernels.plan import MAX_SLICES


@lru_cache(maxsize=64)
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors; where the kernels are interpreted, few enough that programs take several units."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@lru_cache(maxsize=64)
def _has_pdl(device: torch.device) -> bool:
    """PDL exists from compute capability 9.0 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def pdl_options(wanted: bool, device: torch.device) -> dict[str, Any]:
    """The launch keywords that turn PDL on, or off where the device (or Triton's interpreter) has none."""
    return {"PDL": True, "launch_pdl": True} if wanted and _has_pdl(device) else {"PDL": False}


def check_weights(weights: Sequence[torch.Tensor], rank: int, dtype: torch.dtype) -> None:
    """Every weight must be contiguous [max_loras, 1, out, in] of the inputs' dtype, 1 to 3 of them, of one rank."""
    if not 1 <= len(weights) <= MAX_SLICES:
        raise ValueError(f"a launch takes 1 to {MAX_SLICES} slices, not {len(weights)}")
    for weight in weights:
        if weight.dtype != dtype:
            raise ValueError(f"weights must be {dtype} as the inputs are, found {weight.dtype}")
        if weight.ndim != 4 or not weight.is_contiguous() or rank not in weight.shape[2:]:
            raise ValueError(
                f"weights must be contiguous [slots, 1, …] with rank {rank}, found shape {tuple(weight.shape)}"
            )


def three(items: Sequence[Any]) -> list[Any]:
    """The items, the last one repeated up to three: kernels take three slices and use as many as SLICES says."""
    return [*items, *[items[-1]] * (MAX_SLICES - len(items))]
