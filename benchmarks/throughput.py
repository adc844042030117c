"""Output tokens per second of `vllm.LLM`: stock, and LoRazor with rows that let go of their adapters; taking turns.

    python benchmarks/throughput.py --out throughput.csv      # 8 adapters of rank 16, resident
    python benchmarks/throughput.py --adapters 64 --max-loras 8 --stock-loras 64 --out contended.csv

A Llama-3.1-8B shape with dummy weights in bfloat16, random adapters on every linear layer, fixed lengths; all engines
live on the GPU at the same time. Loads:

    steady    requests queue up, the first `sequences` of them with lengths from 1/sequences of the output upwards, so
              that rows are at different steps from then on; counted is the time from the end of the first wave until
              fewer requests are left than run at once (with fewer slots than adapters: the whole time)
    lockstep  `sequences` requests at once, all of one length: the whole time

Arms: `stock`; `stock, best` (the tile sizes of benchmarks/stock_configs, and `--stock-loras` slots); `never` (LoRazor,
nobody released); `released` (the same engine; `--never` of the requests keep their adapter, the others let go at a step
uniform on [1, share x output]); `policy` (an engine that probes every `--interval` tokens and scores, and releases
nobody); `base` (the LoRazor engine, requests without an adapter).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from engines import Engine, provenance, write_rows
from throughput_model import VOCABULARY, make_adapter, make_base, make_policy

from lorazor.training.bench_release import ReleaseSteps

TUNED = Path(__file__).parent / "stock_configs"
DISTINCT = 8  # adapters with weights of their own; more names share them
ARMS = {"stock": "stock", "stock, best": "best", "never": "ours", "released": "ours", "policy": "policy"}


def engine_options(base: Path, options: argparse.Namespace, slots: int) -> dict[str, Any]:
    """Options of vllm.LLM that all engines share."""
    n = options.sequences
    return {
        "model": str(base),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "enable_lora": True,
        "max_loras": slots,
        "max_cpu_loras": max(options.adapters, slots),
        "max_lora_rank": options.rank,
        "max_num_seqs": n,
        "max_model_len": options.prompt + options.output + 16,
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.2,
        "kv_cache_memory_bytes": options.kv_gib << 30,  # given, so that no engine measures what others leave
        # Decode steps, decode steps beside one to three prompts, and those with shadow rows for probes.
        "compilation_config": {
            "cudagraph_capture_sizes": [1, n // 4, n // 2, 3 * n // 4, n, n + 8, n + 16, 2 * n, 3 * n, 4 * n]
        },
        "seed": 0,
    }


def slots_of(options: argparse.Namespace, kind: str) -> int:
    """Adapter slots of a kind of engine."""
    slots: int = (options.stock_loras if kind == "best" else 0) or options.max_loras or options.adapters
    return slots


def start_engines(scratch: Path, options: argparse.Namespace, arms: list[str]) -> dict[str, Engine]:
    """The engines that the arms need, all started at once."""
    base = make_base(scratch / "base")
    folders = [make_adapter(scratch / f"a{k}", options.rank) for k in range(min(options.adapters, DISTINCT))]
    adapters = {f"a{k}": str(folders[k % len(folders)]) for k in range(options.adapters)}
    engines = {}
    for kind in dict.fromkeys(ARMS[arm] for arm in arms):
        settings = engine_options(base, options, slots_of(options, kind))
        if kind == "ours":
            settings["additional_config"] = {"lorazor": {}}
        if kind == "policy":
            policy = make_policy(scratch / "policy", base, folders, options.interval, options.output)
            settings["additional_config"] = {"lorazor": {"policy": str(policy)}}
        environment = {"VLLM_TUNED_CONFIG_FOLDER": str(TUNED)} if kind == "best" else None
        log = options.out.with_name(f"{options.out.stem}-{kind}.log")
        engines[kind] = Engine(settings, adapters, log, environment)
    for kind, engine in engines.items():
        print(kind, "starts in", round(engine.wait()["started"]), "s", flush=True)
    return engines


def asks_of(options: argparse.Namespace, load: str, arm: str, seed: int) -> list[dict[str, Any]]:
    """The requests of one turn: the same in every arm but for adapter and release."""
    draw, n = Random(seed), options.sequences
    steps = ReleaseSteps(1, options.share, options.never)
    asks = []
    for k in range(options.requests if load == "steady" else n):
        prompt, step = draw.choices(range(10, VOCABULARY - 10), k=options.prompt), steps.draw(draw, options.output)
        tokens = max(1, options.output * (k + 1) // n) if load == "steady" and k < n else options.output
        asks.append({"prompt": prompt, "adapter": f"a{k % options.adapters}", "tokens": tokens})
        if arm == "base":
            asks[-1]["adapter"] = None
        if arm in ("released", "never"):
            asks[-1]["release"] = "never" if arm == "never" or step is None else step
    return asks


def measure(engines: dict[str, Engine], options: argparse.Namespace, arms: list[str]) -> list[dict[str, Any]]:
    """One row for each load and arm; another arm begins each round, and a short one before warms up."""
    for engine in engines.values():
        engine.run(asks=asks_of(options, "lockstep", "stock", -1), first=0, last=0)
    rows = []
    for load in ("steady", "lockstep"):
        contended = 0 < options.max_loras < options.adapters
        window = (options.sequences, options.sequences) if load == "steady" and not contended else (0, 0)
        found: dict[str, list[float]] = {arm: [] for arm in arms}
        for turn in range(options.rounds):
            for arm in (*arms[turn % len(arms) :], *arms[: turn % len(arms)]):
                asks = asks_of(options, load, arm, turn)
                answer = engines[ARMS.get(arm, "ours")].run(asks=asks, first=window[0], last=window[1])
                found[arm].append(answer["tokens"] / answer["seconds"])
                print(load, arm, round(found[arm][-1]), flush=True)
        for arm, values in found.items():
            about = {
                "adapters": options.adapters,
                "rank": options.rank,
                "slots": slots_of(options, ARMS.get(arm, "ours")),
            }
            about |= {"sequences": options.sequences}
            about |= {"prompt": options.prompt, "output": options.output, "load": load, "path": arm}
            rows.append(about | {"tokens_per_s": median(values), "rounds": json.dumps([round(v) for v in values])})
    return rows


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("adapters", 8), ("rank", 16), ("sequences", 128), ("prompt", 128), ("output", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--requests", type=int, default=512, help="of a steady load")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-loras", type=int, default=0, help="slots; default: one for each adapter")
    parser.add_argument("--stock-loras", type=int, default=0, help="slots of `stock, best`; default: as many")
    parser.add_argument("--kv-gib", type=int, default=9)
    parser.add_argument("--share", type=float, default=0.35)
    parser.add_argument("--never", type=float, default=0.15)
    parser.add_argument("--interval", type=int, default=16)
    parser.add_argument("--arms", default="stock;stock, best;never;released;policy;base", help="separated by ;")
    parser.add_argument("--out", type=Path, default=Path("throughput.csv"))
    return parser.parse_args()


def main() -> None:
    """Start the engines, take turns, write the CSV."""
    options = parse()
    arms = options.arms.split(";")
    unknown = [arm for arm in arms if arm not in ARMS and arm != "base"]
    if unknown:
        sys.exit(f"--arms must be among {', '.join(ARMS)} and base, got {unknown[0]}")
    with tempfile.TemporaryDirectory() as scratch:
        engines = start_engines(Path(scratch), options, [arm for arm in arms if arm in ARMS])
        rows = measure(engines, options, arms)
        for engine in engines.values():
            engine.close()
    made = provenance()
    write_rows(options.out, [row | made for row in rows])
    for row in rows:
        print(f"{row['load']:9}{row['path']:14}{row['tokens_per_s']:9.0f}  {row['rounds']}")


if __name__ == "__main__":
    main()
