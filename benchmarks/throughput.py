"""Output tokens per second of `vllm.LLM` on our kernels against stock's, engine options the same, taking turns.

    python benchmarks/throughput.py --out throughput.csv
    python benchmarks/throughput.py --adapters 16 --rank 64 --rounds 5

A Llama-3.1-8B shape with dummy weights in bfloat16, random adapters on every linear layer, every row active to the end
(nobody is released), fixed lengths, all requests at once. Both engines live on the GPU at the same time.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from random import Random
from statistics import median

import torch
from engines import Engine, provenance, write_rows
from safetensors.torch import save_file

LAYERS, HIDDEN, INNER, KV, VOCABULARY = 32, 4096, 14336, 1024, 128256
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
# The two sizes, in and out, of each linear layer that has an adapter.
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, KV),
    "self_attn.v_proj": (HIDDEN, KV),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INNER),
    "mlp.up_proj": (HIDDEN, INNER),
    "mlp.down_proj": (INNER, HIDDEN),
}


def make_base(folder: Path) -> Path:
    """A model folder without weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def make_adapter(folder: Path, rank: int, device: str = "cuda") -> Path:
    """A PEFT folder with random weights on all layers."""
    folder.mkdir()
    targets = sorted({name.rsplit(".", 1)[-1] for name in SHAPES})
    about = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    weights = {}
    for layer in range(LAYERS):
        for name, (inside, outside) in SHAPES.items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            for part, size in (("A", (rank, inside)), ("B", (outside, rank))):
                drawn = torch.empty(size, dtype=torch.bfloat16, device=device).normal_(std=0.01)
                weights[f"{key}.lora_{part}.weight"] = drawn.cpu()
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


def engine_options(base: Path, options: argparse.Namespace, ours: bool) -> dict[str, object]:
    """Options of vllm.LLM, the same for both but for the one key that turns our kernels on."""
    extra = {"additional_config": {"lorazor": {}}} if ours else {}
    return {
        "model": str(base),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "enable_lora": True,
        "max_loras": options.max_loras or options.adapters,
        "max_cpu_loras": max(options.adapters, options.max_loras or 0),
        "max_lora_rank": options.rank,
        "max_num_seqs": options.sequences,
        "max_model_len": options.prompt + options.output + 16,
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.3,
        "kv_cache_memory_bytes": 9 << 30,  # given, so that neither engine measures what the other leaves
        "compilation_config": {"cudagraph_capture_sizes": sorted({1, 8, 32, 64, options.sequences})},
        "seed": 0,
        **extra,
    }


def asks_of(options: argparse.Namespace, adapters: list[str], seed: int) -> list[dict[str, object]]:
    """`sequences` requests with random prompts, over the adapters in turn; none of them: the base model."""
    draw = Random(seed)
    names = adapters or [None]
    return [
        {"prompt": draw.choices(range(10, VOCABULARY - 10), k=options.prompt), "adapter": names[k % len(names)]}
        for k in range(options.requests or options.sequences)
    ]


def measure(engines: dict[str, Engine], options: argparse.Namespace, names: list[str]) -> dict[str, list[float]]:
    """Tokens per second of each engine in each round, after one round that warms up; the last entry has no adapter."""
    found: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(-1, options.rounds):
        for name, engine in engines.items():
            asks = asks_of(options, names, turn)
            answer = engine.run(asks=asks, tokens=options.output, group=len(asks))
            if turn >= 0:
                found[name].append(answer["tokens"] / answer["seconds"])
    for name, engine in engines.items():
        asks = asks_of(options, [], options.rounds)
        answer = engine.run(asks=asks, tokens=options.output, group=len(asks))
        found[f"{name}, requests without an adapter"] = [answer["tokens"] / answer["seconds"]]
    return found


def main() -> None:
    """Start both engines, take turns, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("adapters", 8), ("rank", 16), ("sequences", 128), ("prompt", 128), ("output", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=0, help="default: as many as sequences")
    parser.add_argument("--max-loras", type=int, default=0, help="slots; default: one for each adapter")
    parser.add_argument("--out", type=Path, default=Path("throughput.csv"))
    parser.add_argument("--start-file", type=Path, help="measure only once this file exists")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        base = make_base(Path(scratch) / "base")
        made = {f"a{k}": str(make_adapter(Path(scratch) / f"a{k}", options.rank)) for k in range(options.adapters)}
        torch.cuda.empty_cache()
        engines = {}
        for name in ("stock", "ours"):
            log = options.out.with_name(f"{options.out.stem}-{name}.log")
            engines[name] = Engine(engine_options(base, options, name == "ours"), made, log)
        for name, engine in engines.items():
            print(name, "starts in", round(engine.wait()["started"]), "s", flush=True)
        while options.start_file and not options.start_file.exists():
            time.sleep(0.5)
        found = measure(engines, options, list(made))
        for engine in engines.values():
            engine.close()
    rows = []
    for path, values in found.items():
        row = {"adapters": options.adapters, "rank": options.rank, "sequences": options.sequences, "path": path}
        rows.append({**row, "tokens_per_s": median(values), "rounds": json.dumps([round(v) for v in values])})
    made_by = provenance() | {"prompt": options.prompt, "output": options.output, "max_loras": options.max_loras}
    write_rows(options.out, [row | made_by for row in rows])
    for row in rows:
        print(row["path"], round(row["tokens_per_s"]), row["rounds"])
    print(f"ours / stock: {median(found['ours']) / median(found['stock']):.3f}")


if __name__ == "__main__":
    main()
