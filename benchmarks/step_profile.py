"""What a decode step's GPU time is spent on: milliseconds a step by kind of kernel.

    python benchmarks/step_profile.py --out step_profile.csv               # options as of throughput.py, which see
    python benchmarks/step_profile.py --prompt 120 --out step_profile.csv

One engine with a policy, in this process, under throughput.py's steady load, in turns: requests that the policy may
judge (`policy`; it releases nobody), that never release (`never`: no probes) and that have no adapter (`base`). A step
holds `sequences` decode rows, half of the steps a prompt as well. Of `--rounds` turns the medians.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import throughput
from engine_child import request_of
from engines import provenance, write_rows
from throughput_model import make_adapter, make_base, make_policy

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the profiler sees its own process
ARMS = ("policy", "never", "base")
WARM_UP, STEPS = 40, 32
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
    """An engine with a policy, and its adapters by name."""
    from vllm import LLM

    base = make_base(scratch / "base")
    folders = [make_adapter(scratch / f"a{k}", options.rank) for k in range(options.adapters)]
    policy = make_policy(scratch / "policy", base, folders, options.interval, options.output)
    settings = throughput.engine_options(base, options, options.adapters)
    return LLM(**settings, additional_config={"lorazor": {"policy": str(policy)}}).llm_engine, {
        folder.name: str(folder) for folder in folders
    }


def add(engine: Any, names: dict[str, str], asks: list[dict[str, Any]], prefix: str) -> list[str]:
    """Queue the requests; their ids."""
    from vllm import SamplingParams

    for k, ask in enumerate(asks):
        release = {"lorazor_release": ask["release"]} if "release" in ask else None
        params = SamplingParams(
            temperature=0.0, max_tokens=ask["tokens"], ignore_eos=True, detokenize=False, extra_args=release
        )
        prompt, lora = {"prompt_token_ids": ask["prompt"]}, request_of(names, ask["adapter"])
        engine.add_request(f"{prefix}-{k}", prompt, params, lora_request=lora)
    return [f"{prefix}-{k}" for k in range(len(asks))]


def profile(engine: Any) -> dict[str, float]:
    """Milliseconds a step of each group."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(STEPS):
            engine.step()
    found = dict.fromkeys((*GROUPS, "the rest"), 0.0)
    for event in recorded.events() or ():
        if event.device_type == DeviceType.CUDA:
            found[group_of(event.name)] += event.device_time / 1e3 / STEPS
    return found


def measure(engine: Any, names: dict[str, str], options: argparse.Namespace) -> Iterator[tuple[str, dict[str, float]]]:
    """An arm and what its steps took, turn by turn."""
    for turn in range(options.rounds):
        for arm in ARMS:
            ids = add(engine, names, throughput.asks_of(options, "steady", arm, turn), f"{turn}-{arm}")
            for _ in range(WARM_UP):
                engine.step()
            yield arm, profile(engine)
            engine.abort_request(ids)
            while engine.has_unfinished_requests():
                engine.step()


def main() -> None:
    """Start, take turns, write the CSV."""
    options = throughput.parse()
    with tempfile.TemporaryDirectory() as scratch:
        engine, names = start(Path(scratch), options)
        turns = list(measure(engine, names, options))
    rows, made = [], provenance()
    for arm in ARMS:
        mine = [found for name, found in turns if name == arm]
        for group in (*GROUPS, "the rest"):
            values = [found[group] for found in mine]
            about = {"prompt": options.prompt, "path": arm, "group": group, "turns": len(values)}
            rows.append(about | {"ms": round(median(values), 3)} | made)
            print(f"{arm:8}{group:24}{rows[-1]['ms']:8.3f}")
    write_rows(options.out, rows)


if __name__ == "__main__":
    main()
