"""Makes the demo's committed traces with `lorazor collect`: needs the model, both adapters and, in practice, a GPU.

    python examples/make_traces.py .models/SmolLM2-135M-Instruct examples/adapters examples/traces

Three collections that share no request: `train`, on which the policy is trained, `calibrate`, on which its thresholds
are tuned, and `test`, on which it is judged. With float32 the traces are those of a CPU server but for the last digits.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import yaml
from tasks import TASKS, generate

SEEDS = {"train": 1, "calibrate": 2, "test": 3}
MAX_TOKENS = 64
PROBE_INTERVAL = 4


def write_config(folder: Path, args: argparse.Namespace, count: int, seed: int) -> Path:
    """Requests of every task as JSONL, and the YAML that names them."""
    folder.mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        rows = [json.dumps(item) for item in generate(task, count, seed)]
        (folder / f"{task}.jsonl").write_text("\n".join(rows) + "\n")
    config = {
        "base": str(args.model.resolve()),
        "adapters": {task: str((args.adapters / task).resolve()) for task in TASKS},
        "probe_interval": PROBE_INTERVAL,
        "shard_size": args.batch,
        "engine": {
            "dtype": args.dtype,
            "enforce_eager": True,
            "max_model_len": 512,
            "max_num_seqs": args.batch,
            "kv_cache_memory_bytes": 4 << 30,
            "seed": 0,
        },
        "tasks": {
            task: {"adapter": task, "data": f"{task}.jsonl", "scorer": "exact_match", "max_tokens": MAX_TOKENS}
            for task in TASKS
        },
    }
    path = folder / "collect.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("adapters", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", type=int, default=1024, help="requests a task")
    parser.add_argument("--calibrate", type=int, default=800, help="requests a task")
    parser.add_argument("--test", type=int, default=476, help="requests a task")
    parser.add_argument("--batch", type=int, default=512, help="requests a shard, and sequences that run at once")
    parser.add_argument("--dtype", default="float32", help="bfloat16 runs vLLM's own LoRA kernels")
    args = parser.parse_args()

    for split, seed in SEEDS.items():
        work = args.out / f"{split}-requests"
        config = write_config(work, args, getattr(args, split), seed)
        # A process each, so that one engine's memory is free before the next starts.
        subprocess.run([Path(sys.executable).with_name("lorazor"), "collect", config, args.out / split], check=True)


if __name__ == "__main__":
    main()
