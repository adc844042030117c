"""What a step's time is spent on: milliseconds by kind of kernel, and by the clock.

    python benchmarks/step_profile.py --out step_profile.csv               # options as of throughput.py, which see
    python benchmarks/step_profile.py --prompt 120 --out step_profile.csv
    python benchmarks/step_profile.py --adapters 64 --max-loras 8 --loads contended --arms "released;never" --out x.csv

One engine with a policy, in this process, under one of throughput.py's loads; its arms `policy`, `never` (no probes),
`released` and `base` take turns. Of `--rounds` turns the medians. Kernels that overlap both count in full.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import throughput
from engine_child import queue, request_of
from engines import provenance, write_rows
from throughput_model import make_base, make_policy

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the profiler sees its own process
ARMS = ("policy", "never", "released", "base")
WARM_UP = {"steady": 40, "varied": 40, "contended": 400}  # steps, until as many rows come as go
STEPS, CLOCKED = 32, 200  # under the profiler, and by the clock
GROUPS = {
    "base model's products": r"nvjet|gemm|splitK",
    "attention": r"flash::|reshape_and_cache",
    "adapters": r"_shrink_kernel|_expand_kernel|_build_tiles",
    "signals and trees": r"_(summary|adapter|probe|divergence|window|forest)_kernel|^_place$",
}


def group_of(kernel: str) -> str:
    """The kind of work of a kernel, by its name."""
    return next((group for group, pattern in GROUPS.items() if re.search(pattern, kernel)), "the rest")


def start(scratch: Path, options: argparse.Namespace) -> tuple[Any, dict[str, str]]:
    """An engine with a policy, and its adapters by name, each of them read once."""
    from vllm import LLM

    base = make_base(scratch / "base")
    folders, names = throughput.make_adapters(scratch, options)
    policy = make_policy(scratch / "policy", base, folders, options.interval, options.output)
    settings = throughput.engine_options(base, options, throughput.slots_of(options, "ours"))
    engine = LLM(**settings, additional_config={"lorazor": {"policy": str(policy)}}).llm_engine
    for name in names:
        engine.add_lora(request_of(names, name))
    return engine, names


def step(engine: Any, steps: int) -> tuple[float, float]:
    """Milliseconds and output tokens a step."""
    begun, tokens = time.perf_counter(), 0
    for _ in range(steps):
        tokens += sum(len(output.outputs[0].token_ids) for output in engine.step())
    return (time.perf_counter() - begun) * 1e3 / steps, tokens / steps


def profile(engine: Any) -> dict[str, float]:
    """Milliseconds a step of each group."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA]) as recorded:
        step(engine, STEPS)
    found = dict.fromkeys((*GROUPS, "the rest"), 0.0)
    for event in recorded.events() or ():
        if event.device_type == DeviceType.CUDA:
            found[group_of(event.name)] += event.device_time / 1e3 / STEPS
    return found


def measure(
    engine: Any, names: dict[str, str], options: argparse.Namespace, arms: list[str]
) -> Iterator[tuple[str, dict[str, float]]]:
    """An arm and what its steps took, turn by turn."""
    load = options.loads[0]
    for turn, arm in product(range(options.rounds), arms):
        ids = queue(engine, names, throughput.asks_of(options, load, arm, turn), f"{turn}-{arm}")
        step(engine, WARM_UP[load])
        clock, tokens = step(engine, CLOCKED)
        yield arm, {"tokens": tokens, "by the clock": clock} | profile(engine)
        engine.abort_request(ids)
        while engine.has_unfinished_requests():
            engine.step()


def main() -> None:
    """Start, take turns, write the CSV."""
    options = throughput.parse()
    arms = [arm for arm in options.arms.split(";") if arm in ARMS]
    if not arms or options.loads[0] not in WARM_UP:
        sys.exit(f"--arms needs some of {', '.join(ARMS)}, and --loads one of {', '.join(WARM_UP)} first")
    with tempfile.TemporaryDirectory() as scratch:
        engine, names = start(Path(scratch), options)
        turns = list(measure(engine, names, options, arms))
    rows, made = [], provenance()
    about = {name: getattr(options, name) for name in ("adapters", "rank", "prompt")} | {"load": options.loads[0]}
    for arm in arms:
        mine = [found for name, found in turns if name == arm]
        found = {name: round(median(turn[name] for turn in mine), 3) for name in mine[0]}
        here = about | {"path": arm, "turns": len(mine), "tokens": found.pop("tokens")}
        rows += [here | {"group": group, "ms": ms} | made for group, ms in found.items()]
        print("\n".join(f"{arm:10}{group:24}{ms:8.3f}" for group, ms in found.items()))
    write_rows(options.out, rows)


if __name__ == "__main__":
    main()
