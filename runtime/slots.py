"""What a step and its adapters mean in slots: vectorised, on the host, without anything read back from the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Slots = NDArray[np.int32]


def slots_of(ids: NDArray[np.integer[Any]], slot_ids: Sequence[int | None]) -> Slots:
    """The slot of each adapter id, -1 for ids below 1: [7, 0, 5] over slots [5, None, 7] -> [2, -1, 0].

    Raises:
        KeyError: an adapter that has no slot.
    """
    known = np.array([i or 0 for i in slot_ids], np.int64)
    order = np.argsort(known, kind="stable")
    place = np.searchsorted(known, ids, sorter=order)
    slots = order[np.minimum(place, len(known) - 1)]
    lost = ids[(ids > 0) & (known[slots] != ids)]
    if lost.size:
        raise KeyError(int(lost[0]))
    return np.where(ids > 0, slots, -1).astype(np.int32)


def rank_bound(model: Any, full: int) -> int:
    """The most columns that any module of an adapter (vLLM's LoRAModel) fills; `full` where that cannot be told.

    From the weights, not from the configuration: modules may differ (rank_pattern), and packed ones are lists.
    """
    ranks = [0]
    for weights in model.loras.values():
        parts = weights.lora_a if isinstance(weights.lora_a, list | tuple) else [weights.lora_a]
        ranks += [part.shape[0] if part.ndim == 2 else full for part in parts if part is not None]
    return min(max(ranks), full)


def to_device(target: torch.Tensor, values: NDArray[Any]) -> None:
    """Copy to the device in stream order; the host does not wait, and torch keeps the pinned memory until then."""
    host = torch.from_numpy(values)
    target.copy_(host.pin_memory() if target.device.type == "cuda" else host, non_blocking=True)
