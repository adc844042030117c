"""The contestants of benchmarks/kernels.py: stock vLLM's LoRA kernels and ours, as one CUDA graph over all layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import quantiles
from typing import Protocol

import torch
from kernel_points import Module

from lorazor.kernels.dispatch import add_lora
from lorazor.kernels.metadata import TileList
from lorazor.kernels.plan import Plan


class Contestant(Protocol):
    """Adds one module's LoRA output to y for the rows that are active now."""

    def __call__(self, module: Module, y: torch.Tensor) -> None: ...


def ours(listed: TileList, rows: int, plan_of: Callable[[Module], Plan] | None = None) -> Contestant:
    """Our kernels over the tiles that `listed` holds when they run."""
    tiles = listed.view(rows)

    def run(module: Module, y: torch.Tensor) -> None:
        plan = plan_of(module) if plan_of else None
        add_lora(y, module.x, module.lora_a, module.lora_b, tiles, plan=plan, path="triton")

    return run


def stock(slots: torch.Tensor, adapters: int) -> Contestant:
    """vLLM's kernels, at their best: the grid covers the adapters that are active (and "none") and no more.

    Raises ImportError where there is no vLLM.
    """
    from vllm.lora.ops.triton_ops import LoRAKernelMeta, lora_expand, lora_shrink, utils

    # vLLM keeps strides by address, and the weights of an earlier point may have lain at the same one.
    utils._LORA_A_PTR_DICT.clear()
    utils._LORA_B_PTR_DICT.clear()
    rows = len(slots)
    meta = LoRAKernelMeta.make(adapters, rows, "cuda")
    meta.prepare_tensors(slots.cuda())
    arguments = meta.meta_args(rows, specialize_active_lora=True)

    def run(module: Module, y: torch.Tensor) -> None:
        rank = module.lora_a[0].shape[2]
        buffer = torch.empty((len(module.lora_a), rows, rank), dtype=torch.float32, device="cuda")
        lora_shrink(module.x, module.lora_a, buffer, *arguments, 1.0)
        lora_expand(buffer, module.lora_b, y, *arguments, offset_start=0, add_inputs=True)

    return run


def capture(contestant: Contestant, model: Sequence[Module]) -> torch.cuda.CUDAGraph:
    """All modules in one graph, after an eager pass that compiles."""
    for module in model:
        contestant(module, module.y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for module in model:
            contestant(module, module.y)
    return graph


def alternate(actions: dict[str, Callable[[], object]], replays: int) -> dict[str, tuple[float, float, float]]:
    """Milliseconds (median, p20, p80) of each action on the device, taking turns."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(replays + 3):
        for name, action in actions.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            action()
            end.record()
            end.synchronize()
            if turn >= 3:
                times[name].append(start.elapsed_time(end))
    cuts = {name: quantiles(values, n=10, method="inclusive") for name, values in times.items()}
    return {name: (cut[4], cut[1], cut[7]) for name, cut in cuts.items()}
