"""Output tokens per second of `vllm.LLM`: stock, and LoRazor with rows that let go of their adapters; taking turns.

    python benchmarks/throughput.py --out throughput.csv                         # 8 adapters of rank 16, resident
    python benchmarks/throughput.py --adapters 64 --max-loras 8 --out more.csv   # also 64 adapters that share 8 slots

A Llama-3.1-8B shape with dummy weights in bfloat16, random adapters on every linear layer, fixed lengths; all engines
live on the GPU at the same time. Loads:

    steady      requests queue up, the first `sequences` of them with lengths from 1/sequences of the output upwards, so
                that rows are at different steps from then on; as many adapters as slots; counted is the time from the
                end of the first wave until fewer requests are left than run at once
    varied      the same with prompts of half to one and a half times the length, so that steps differ in tokens
    contended   steady with all adapters, if there are more than slots; the whole time
    lockstep    `sequences` requests at once, all of one length; as many adapters as slots; the whole time

Arms: `stock`; `stock, no plugin` (LoRazor is not even imported); `stock, best` (the tile sizes of
benchmarks/stock_configs, and `--stock-loras` slots); `never` (LoRazor, nobody released); `released` (the same engine;
`--never` of the requests keep their adapter, the others let go at a step uniform on [1, share x output]); `policy` (an
engine that probes every `--interval` tokens and scores, and releases nobody); `unprobed` (the same without probes: it
scores as often); `base` (the LoRazor engine, requests without an adapter).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from engines import Engine, provenance, write_rows
from throughput_model import VOCABULARY, make_adapter, make_base, make_policy

from lorazor.training.bench_release import ReleaseSteps

TUNED = Path(__file__).parent / "stock_configs"
SIXTEENTHS = (4, 8, 12, 14, 15, 16, 17, 18, 20, 24, 28, 32, 33, 34, 36, 40, 48, 49, 50, 52, 64)
DISTINCT = 8  # adapters with weights of their own; more names share them
START = time.monotonic()
ARMS = {
    "stock": "stock",
    "stock, no plugin": "bare",
    "stock, best": "best",
    "never": "ours",
    "released": "ours",
    "policy": "policy",
    "unprobed": "unprobed",
}


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
        "max_model_len": 3 * options.prompt // 2 + options.output + 16,
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.2,
        "kv_cache_memory_bytes": options.kv_gib << 30,  # given, so that no engine measures what others leave
        # Decode steps, those beside one to three prompts, and both with shadow rows for probes.
        "compilation_config": {"cudagraph_capture_sizes": [1, *(round(n * k / 16) for k in SIXTEENTHS)]},
        "seed": 0,
    }


def slots_of(options: argparse.Namespace, kind: str) -> int:
    """Adapter slots of a kind of engine."""
    slots: int = (options.stock_loras if kind == "best" else 0) or options.max_loras or options.adapters
    return slots


def make_adapters(scratch: Path, options: argparse.Namespace) -> tuple[list[Path], dict[str, str]]:
    """Folders with weights of their own, and the folder of each adapter by its name."""
    folders = [make_adapter(scratch / f"a{k}", options.rank) for k in range(min(options.adapters, DISTINCT))]
    return folders, {f"a{k}": str(folders[k % len(folders)]) for k in range(options.adapters)}


def start_engines(scratch: Path, options: argparse.Namespace, arms: list[str]) -> dict[str, Engine]:
    """The engines that the arms need, all started at once."""
    base = make_base(scratch / "base")
    folders, adapters = make_adapters(scratch, options)
    engines = {}
    for kind in dict.fromkeys(ARMS[arm] for arm in arms):
        settings = engine_options(base, options, slots_of(options, kind))
        if kind == "ours":
            settings["additional_config"] = {"lorazor": {}}
        if kind in ("policy", "unprobed"):
            policy = make_policy(scratch / kind, base, folders, options.interval, options.output, kind == "policy")
            settings["additional_config"] = {"lorazor": {"policy": str(policy)}}
        environment = {"best": {"VLLM_TUNED_CONFIG_FOLDER": str(TUNED)}, "bare": {"VLLM_PLUGINS": ""}}.get(kind)
        log = options.out.with_name(f"{options.out.stem}-{kind}.log")
        engines[kind] = Engine(settings, adapters, log, environment)
    for kind, engine in engines.items():
        print(kind, "starts in", round(engine.wait()["started"]), "s", flush=True)
    return engines


def asks_of(options: argparse.Namespace, load: str, arm: str, seed: int) -> list[dict[str, Any]]:
    """The requests of one turn: the same in every arm but for adapter and release."""
    draw, n = Random(seed), options.sequences
    steps = ReleaseSteps(1, options.share, options.never)
    adapters = options.adapters if load == "contended" else min(options.adapters, slots_of(options, "ours"))
    asks = []
    for k in range(n if load == "lockstep" else options.requests):
        length = draw.randint(options.prompt // 2, 3 * options.prompt // 2) if load == "varied" else options.prompt
        prompt, step = draw.choices(range(10, VOCABULARY - 10), k=length), steps.draw(draw, options.output)
        tokens = max(1, options.output * (k + 1) // n) if load != "lockstep" and k < n else options.output
        asks.append({"prompt": prompt, "adapter": f"a{k % adapters}", "tokens": tokens})
        if arm == "base":
            asks[-1]["adapter"] = None
        if arm in ("released", "never"):
            asks[-1]["release"] = "never" if arm == "never" or step is None else step
    return asks


def measure(engines: dict[str, Engine], options: argparse.Namespace, arms: list[str]) -> list[dict[str, Any]]:
    """The table, written anew after each number, so that what was measured outlives a time limit.

    A number is of a round, load and arm; another arm begins each round.
    """
    for engine in engines.values():
        engine.run(asks=asks_of(options, "lockstep", "stock", -1), first=0, last=0)
    found: dict[tuple[str, str], list[float]] = {}
    rows, made = list[dict[str, Any]](), provenance()
    for turn in range(options.rounds):
        for load in options.loads:
            kept = options.sequences if load in ("steady", "varied") else 0
            for arm in (*arms[turn % len(arms) :], *arms[: turn % len(arms)]):
                if time.monotonic() - START > options.seconds:
                    return rows
                asks = asks_of(options, load, arm, turn)
                answer = engines[ARMS.get(arm, "ours")].run(asks=asks, first=kept, last=kept)
                found.setdefault((load, arm), []).append(answer["tokens"] / answer["seconds"])
                print(load, arm, round(found[load, arm][-1]), flush=True)
                rows = [row_of(options, *key, values) for key, values in found.items()]
                write_rows(options.out, [row | made for row in rows])
    return rows


def row_of(options: argparse.Namespace, load: str, arm: str, values: list[float]) -> dict[str, Any]:
    """One row of the table."""
    slots = slots_of(options, ARMS.get(arm, "ours"))
    adapters = options.adapters if load == "contended" else min(options.adapters, slots_of(options, "ours"))
    about = {"adapters": adapters, "rank": options.rank, "slots": slots, "sequences": options.sequences}
    about |= {"prompt": options.prompt, "output": options.output, "load": load, "path": arm}
    return about | {"tokens_per_s": median(values), "rounds": json.dumps([round(v) for v in values])}


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
    parser.add_argument("--loads", default="", help="separated by ;  default: all that apply")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin nothing more after this time")
    parser.add_argument("--out", type=Path, default=Path("throughput.csv"))
    options = parser.parse_args()
    contended = 0 < options.max_loras < options.adapters
    loads = ["steady", "varied", *(["contended"] if contended else []), "lockstep"]
    options.loads = options.loads.split(";") if options.loads else loads
    return options


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
    for row in rows:
        print(f"{row['load']:10}{row['path']:14}{row['tokens_per_s']:9.0f}  {row['rounds']}")


if __name__ == "__main__":
    main()
