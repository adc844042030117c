"""Other choices for the contestants of benchmarks/kernels.py: plans of ours, and a quick tuning run for stock vLLM."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from kernel_errors import errors, passing
from kernel_paths import Contestant, alternate, capture, stock, use_configs
from kernel_points import Point, make_model

from lorazor.kernels.plan import Plan

# For --tune: each changes one choice of the default plan, and what must follow it.
CHANGES: dict[str, Callable[[Plan], Plan]] = {
    "pdl off": lambda plan: replace(plan, pdl=False),
    "not early": lambda plan: replace(plan, early=False),
    "chunk/2": lambda plan: replace(plan, chunk=plan.chunk // 2, block_k=min(plan.block_k, plan.chunk // 2)),
    "chunk*2": lambda plan: replace(plan, chunk=plan.chunk * 2, early=False),
    "block_k/2": lambda plan: replace(plan, block_k=plan.block_k // 2, early=False),
    "shrink_rank/2": lambda plan: replace(plan, shrink_rank=max(16, plan.shrink_rank // 2)),
    "block_n/2": lambda plan: replace(plan, block_n=plan.block_n // 2),
    "block_n*2": lambda plan: replace(plan, block_n=plan.block_n * 2),
    "expand_warps 4": lambda plan: replace(plan, expand_warps=4),
    "expand_programs*2": lambda plan: replace(plan, expand_programs=plan.expand_programs * 2),
}

Config = dict[str, Any]
# For --tune-stock: by vLLM's name of the operation, what is tried beside its defaults, at which points.
TRIED: dict[str, list[Config]] = {
    "SHRINK": [
        {"block_m": 16, "block_k": 128, "split_k": 16, "num_warps": 4, "num_stages": 3},
        {"block_m": 16, "block_k": 256, "split_k": 16, "num_warps": 4, "num_stages": 2},
        {"block_m": 32, "block_k": 256, "split_k": 8, "num_warps": 8, "num_stages": 3},
    ],
    "EXPAND_TRUE": [
        {"block_m": 16, "block_n": 256, "num_warps": 4, "num_stages": 2},
        {"block_m": 32, "block_n": 128, "num_warps": 4, "num_stages": 2},
        {"block_m": 64, "block_n": 256, "num_warps": 8, "num_stages": 2},
    ],
}
TUNED_AT = [Point.parse("8x16x128"), Point.parse("16x64x128")]
SLICES = (1, 2, 3)
GAIN = 0.98  # of the default's time, at most, or the default stays
REPLAYS = 8


def complete(config: Config, rank: int) -> Config:
    """With the blocks over the rank, and what vLLM wants to find besides."""
    over_rank = {"block_k" if "block_n" in config else "block_n": min(rank, 64)}
    return {**config, **over_rank, "num_ctas": 1, "group_size_m": 8, "max_nreg": None}


def default(operation: str, point: Point, slices: int) -> Config:
    """What vLLM takes by itself."""
    from vllm.lora.ops.triton_ops.utils import get_lora_op_configs

    use_configs(None)
    kind, added = ("shrink", None) if operation == "SHRINK" else ("expand", True)
    found: Config = get_lora_op_configs(kind, point.adapters + 1, point.rows, 4096, point.ranks[0], slices, added)
    return found


def write_configs(folder: Path, operation: str, chosen: dict[Point, Config | None]) -> None:
    """One of vLLM's files of tuned configurations: [adapters][slices][rows][in features][out features].

    vLLM takes the nearest key, except for slices, so these entries serve every point. None: the default at that point.
    """
    by_slices: dict[str, Any] = {}
    for slices in SLICES:
        entries: dict[str, Any] = {}
        for point, config in chosen.items():
            rank, entry = str(point.ranks[0]), config or default(operation, point, slices)
            first, second = ("4096", rank) if operation == "SHRINK" else (rank, "4096")
            entries.setdefault(first, {})[second] = entry
        by_slices[str(slices)] = {str(TUNED_AT[0].rows): entries}
    folder.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name().replace(" ", "_").replace("-", "_")
    (folder / f"{device}_{operation}.json").write_text(json.dumps({str(TUNED_AT[0].adapters): by_slices}))


def race(point: Point, folders: dict[str, Path]) -> dict[str, float]:
    """Milliseconds of stock and of each folder's configurations at the point, all rows active; wrong ones left out."""
    model, slots = make_model(point), point.slots(point.rows)
    contestants: dict[str, Contestant] = {"stock": stock(slots, point.adapters)}
    found = errors(contestants, model, slots)
    for name, folder in folders.items():
        contestant = stock(slots, point.adapters, folder)
        try:
            found |= errors({name: contestant}, model, slots)
            contestants[name] = contestant
        except Exception as failure:  # too large for the device, say
            print(f"stock cannot run {name}: {type(failure).__name__}: {str(failure)[:80]}")
    graphs = {name: capture(contestants[name], model) for name in contestants if name in passing(found)}
    times = alternate({name: graph.replay for name, graph in graphs.items()}, REPLAYS)
    return {name: spread["ms"] for name, spread in times.items()}


def tune_stock() -> Path | None:
    """A folder with the best of `TRIED` for each rank and operation; None where vLLM's defaults are best."""
    home = Path(tempfile.mkdtemp(prefix="stock-configs-"))
    names = {f"{operation} {i}": (operation, tried) for operation in TRIED for i, tried in enumerate(TRIED[operation])}
    for name, (operation, config) in names.items():
        write_configs(home / name, operation, {point: complete(config, point.ranks[0]) for point in TUNED_AT})
    chosen: dict[str, dict[Point, Config | None]] = {operation: {} for operation in TRIED}
    for point in TUNED_AT:
        times = race(point, {name: home / name for name in names})
        print(f"tuning stock at {point}, ms: " + ", ".join(f"{name} {ms:.2f}" for name, ms in times.items()))
        for operation in TRIED:
            rivals = [name for name in names if name in times and names[name][0] == operation]
            best = min(rivals, key=times.__getitem__, default=None)
            faster = best is not None and times[best] < GAIN * times.get("stock", 0.0)
            chosen[operation][point] = complete(names[best][1], point.ranks[0]) if best and faster else None
            print(f"  {operation}: {chosen[operation][point] if faster else 'the default stays'}")
    used = [operation for operation in TRIED if any(chosen[operation].values())]
    for operation in used:
        write_configs(home / "best", operation, chosen[operation])
    return home / "best" if used else None
