"""What both launchers share: whether the device takes programmatic dependent launch, and slices as three arguments.

Programmatic dependent launch (PDL): a kernel may start while the one before it still runs, and waits only where it
first reads what that one wrote. Ours load their tile and their weights before the wait. Two rules keep that right:
every program waits, those without work too (else a kernel could end before its predecessor, and its successor would
read too early); and at least one kernel or copy lies between the last write of the tile list and the first shrink that
reads it (in a model the embedding does; a captured graph's start does as well).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

MAX_SLICES = 3  # of one launch; what vLLM's fused projections (q, k, v) need


@lru_cache(maxsize=64)
def _has_pdl(device: torch.device) -> bool:
    """PDL exists from compute capability 9.0 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def pdl_options(wanted: bool, device: torch.device) -> dict[str, Any]:
    """The launch keywords that turn PDL on, or off where the device (or Triton's interpreter) has none."""
    return {"PDL": True, "launch_pdl": True} if wanted and _has_pdl(device) else {"PDL": False}


def check_slices(weights: Sequence[torch.Tensor], rank: int, dtype: torch.dtype) -> None:
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
    """The items, the last one repeated up to three: kernels take three slices and use as many as the grid names."""
    return [*items, *[items[-1]] * (MAX_SLICES - len(items))]
