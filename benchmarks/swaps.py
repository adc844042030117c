"""The stall of a step that puts an adapter into a slot: vLLM's own way, and LoRazor's images, on a GPU.

    python benchmarks/swaps.py --out swaps.csv            # adapters of rank 16 on all layers of a Llama-3.1-8B shape
    python benchmarks/swaps.py --rank 64

One engine with two slots; adapters take turns in them. Host time is what the step's thread spends in the call, device
time what the model's stream spends until the slot may be used, both on an otherwise idle GPU: medians, p20 and p80.

    stock, disk    the files are read and the slot is filled, as vLLM does for an adapter that it does not hold
    stock          the host holds the adapter: vLLM fills the slot from its tensors
    image          from the adapter's image on the host
    prefetched     the same, with the image sent ahead, as while the adapter waits for its slot
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
from engines import provenance, write_rows
from throughput_model import make_adapter, make_base

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the worker's parts are called here
SLOTS = 2


def start(scratch: Path, options: argparse.Namespace) -> tuple[Any, list[Any]]:
    """vLLM's manager of the worker's adapters and our swaps, and the adapters."""
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    folders = [make_adapter(scratch / f"a{k}", options.rank) for k in range(options.adapters)]
    llm = LLM(
        model=str(make_base(scratch / "base")),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        enable_lora=True,
        max_loras=SLOTS,
        max_cpu_loras=options.adapters,
        max_lora_rank=options.rank,
        max_num_seqs=16,
        max_model_len=256,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 30,
        additional_config={"lorazor": {}},
    )
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    return runner, [LoRARequest(folder.name, 1 + k, str(folder)) for k, folder in enumerate(folders)]


def ways(runner: Any) -> dict[str, tuple[Callable[[Any], None], Callable[[Any], None]]]:
    """What comes before a swap, and the swap, each given the adapter."""
    loras, swaps = runner.lora_manager, runner.swaps
    held = loras._adapter_manager

    def evict(request: Any) -> None:
        held.deactivate_adapter(request.lora_int_id)

    def send(request: Any) -> None:
        evict(request)
        swaps.look_ahead([request])
        swaps.prepare()

    def stock(request: Any) -> None:
        if len(held._active_adapters) >= SLOTS:
            held._active_adapters.remove_oldest()
        swaps._stock(request.lora_int_id)

    def read(request: Any) -> None:
        held.add_adapter(loras._load_adapter(request))
        stock(request)

    def swap(request: Any) -> None:
        held.activate_adapter(request.lora_int_id)

    return {
        "stock, disk": (lambda request: held.remove_adapter(request.lora_int_id), read),
        "stock": (evict, stock),
        "image": (evict, swap),
        "prefetched": (send, swap),
    }


def make_images(runner: Any, requests: list[Any]) -> None:
    """Let every adapter be held and have its image."""
    for request in requests:
        runner.lora_manager.add_adapter(request)
        runner.swaps.look_ahead([request])
        runner.lora_manager._adapter_manager.deactivate_adapter(request.lora_int_id)
        runner.swaps.prepare()
    runner.swaps._background.submit(lambda: None).result()


@torch.inference_mode()
def measure(runner: Any, requests: list[Any], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Milliseconds of the host and of the device of each swap, by way; the ways take turns."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways(runner)}
    for turn in range(rounds + 1):
        for name, (before, swap) in ways(runner).items():
            make_images(runner, requests)  # reading an adapter anew has cost it its image
            runner.swaps.take_counts()
            for request in requests:
                before(request)
                torch.cuda.synchronize()
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                began = time.perf_counter()
                swap(request)
                host = time.perf_counter() - began
                end.record()
                torch.cuda.synchronize()
                if turn:  # the first one warms up
                    found[name].append((1e3 * host, begin.elapsed_time(end)))
            counted = runner.swaps.take_counts()
            if "stock" not in name and "stock" in counted:
                raise RuntimeError(f"{name}: the adapters came another way: {counted}")
    return found


def main() -> None:
    """Start the engine, swap, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("swaps.csv"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        runner, requests = start(Path(scratch), options)
        found = measure(runner, requests, options.rounds)
    rows: list[dict[str, object]] = []
    for name, times in found.items():
        row: dict[str, object] = {"rank": options.rank, "slots": SLOTS, "adapters": options.adapters, "way": name}
        row["image_mib"] = round(runner.swaps.nbytes / 2 / 2**20, 1)
        for what, values in zip(("host", "device"), zip(*times, strict=True), strict=True):
            p20, p50, p80 = (quantiles(values, n=10)[k] for k in (1, 4, 7))
            row |= {f"{what}_ms": p50, f"{what}_p20": p20, f"{what}_p80": p80}
        rows.append(row | provenance())
        print(f"{name:12} host {row['host_ms']:8.3f} ms   device {row['device_ms']:8.3f} ms", flush=True)
    write_rows(options.out, rows)


if __name__ == "__main__":
    main()
