"""The contestants of benchmarks/kernels.py: stock vLLM's LoRA kernels and ours, as one CUDA graph over all layers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import quantiles
from typing import Protocol

import torch
from kernel_points import Module

from lorazor.kernels.dispatch import add_lora
from lorazor.kernels.metadata import TileList
from lorazor.kernels.plan import Plan, plan_for

CONFIG_FOLDER = "VLLM_TUNED_CONFIG_FOLDER"
WARM_UP = 2
# Clock cycles (0.3 ms) that the device is kept busy while the host launches what is to be timed.
HEAD_START = 600_000


class Contestant(Protocol):
    """Adds one module's LoRA output to y for the rows that are active now."""

    def __call__(self, module: Module, y: torch.Tensor) -> None: ...


def ours(
    listed: TileList, rows: int, ranks: torch.Tensor | None = None, change: Callable[[Plan], Plan] | None = None
) -> Contestant:
    """Our kernels over the tiles that `listed` holds when they run; `change` makes another plan of the default one."""
    tiles = listed.view(rows)

    def run(module: Module, y: torch.Tensor) -> None:
        plan = plan_for(rows, module.x.shape[1], module.lora_a[0].shape[2])
        plan = change(plan) if change else plan
        add_lora(y, module.x, module.lora_a, module.lora_b, tiles, ranks=ranks, plan=plan, path="triton")

    return run


def has_stock() -> bool:
    """Whether vLLM is there; says so if not."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        import vllm.lora.ops.triton_ops  # noqa: F401
    except ImportError as missing:
        print(f"stock is left out: {missing}")
        return False
    return True


def use_configs(folder: Path | None) -> None:
    """Have vLLM launch its LoRA kernels with the tuned configurations of that folder; None: its defaults."""
    from vllm.lora.ops.triton_ops import utils

    if os.environ.get(CONFIG_FOLDER) == (str(folder) if folder else None):
        return
    os.environ.pop(CONFIG_FOLDER, None)
    if folder:
        os.environ[CONFIG_FOLDER] = str(folder)
    utils.load_lora_op_config.cache_clear()
    utils.get_lora_op_configs.cache_clear()


def stock(slots: torch.Tensor, adapters: int, configs: Path | None = None) -> Contestant:
    """vLLM's kernels, at their best: the grid covers the adapters that are active (and "none") and no more."""
    from vllm.lora.ops.triton_ops import LoRAKernelMeta, lora_expand, lora_shrink

    rows = len(slots)
    meta = LoRAKernelMeta.make(adapters, rows, "cuda")
    meta.prepare_tensors(slots.cuda())
    arguments = meta.meta_args(rows, specialize_active_lora=True)

    def run(module: Module, y: torch.Tensor) -> None:
        use_configs(configs)
        rank = module.lora_a[0].shape[2]
        buffer = torch.empty((len(module.lora_a), rows, rank), dtype=torch.float32, device="cuda")
        lora_shrink(module.x, module.lora_a, buffer, *arguments, 1.0)
        lora_expand(buffer, module.lora_b, y, *arguments, offset_start=0, add_inputs=True)

    return run


def capture(contestant: Contestant, model: Sequence[Module]) -> torch.cuda.CUDAGraph:
    """All modules in one graph, after an eager pass that compiles (and lets vLLM look up all weights' addresses)."""
    for module in model:
        contestant(module, module.y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for module in model:
            contestant(module, module.y)
    return graph


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, p20 and p80."""
    cuts = quantiles(values, n=10, method="inclusive")
    return {"ms": cuts[4], "p20": cuts[1], "p80": cuts[7]}


def alternate(actions: dict[str, Callable[[], object]], replays: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each action on the device, taking turns; the host's launching is not in them."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(WARM_UP + replays):
        for name, action in actions.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda._sleep(HEAD_START)  # type: ignore[no-untyped-call]
            start.record()
            action()
            end.record()
            end.synchronize()
            if turn >= WARM_UP:
                times[name].append(start.elapsed_time(end))
    return {name: spread(values) for name, values in times.items()}
