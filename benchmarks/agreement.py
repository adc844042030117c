"""How far greedy texts of a real model with real adapters agree: our kernels, stock's, and each with itself.

    python benchmarks/agreement.py .models/SmolLM2-135M-Instruct examples/adapters --out agreement.csv

The demo's base model and its two adapters on requests of the demo's own generator, in bfloat16. Each engine answers the
same requests in batches of several sizes. Greedy texts part where two logits nearly tie, so stock under another batch
size is the measure of what agreement can be had; in vLLM's batch-invariant mode the batch should not matter.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from engines import Engine, provenance, write_rows

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from tasks import TASKS, generate

Texts = list[list[int]]


def make_asks(model: Path, count: int) -> list[dict[str, object]]:
    """`count` requests of each task, as the demo's chat template makes them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    asks = []
    for task in TASKS:
        for item in generate(task, count, seed=5):
            text = tokenizer.apply_chat_template(item["messages"], tokenize=False, add_generation_prompt=True)
            asks.append({"prompt": tokenizer(text, add_special_tokens=False)["input_ids"], "adapter": task})
    return asks


def agreement(one: Texts, other: Texts) -> dict[str, float]:
    """The share of texts that are equal, and the share of tokens before the first difference."""
    same = sum(a == b for a, b in zip(one, other, strict=True))
    common = [next((k for k, (p, q) in enumerate(zip(a, b, strict=False)) if p != q), min(len(a), len(b)))
              for a, b in zip(one, other, strict=True)]  # fmt: skip
    return {"same_texts": same / len(one), "same_tokens": sum(common) / sum(map(len, one))}


def main() -> None:
    """Start the engines, ask, compare, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("adapters", type=Path)
    parser.add_argument("--count", type=int, default=96, help="requests of each task")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("agreement.csv"))
    options = parser.parse_args()
    adapters = {task: str((options.adapters / task).resolve()) for task in TASKS}
    common = {
        "model": str(options.model), "dtype": "bfloat16", "enable_lora": True, "max_loras": len(adapters),
        "max_lora_rank": 16, "max_num_seqs": 128, "max_model_len": 512, "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": 2 << 30, "enable_prefix_caching": False,
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 96, 128]},
    }  # fmt: skip
    kernels = {"additional_config": {"lorazor": {}}}
    engines = {
        f"{name}{', batch-invariant' if invariant else ''}": Engine(
            common | extra,
            adapters,
            options.out.with_name(f"{options.out.stem}-{name}-{invariant}.log"),
            {"VLLM_BATCH_INVARIANT": str(invariant)},
        )
        for name, extra in (("stock", {}), ("ours", kernels))
        for invariant in (0, 1)
    }
    asks = make_asks(options.model, options.count)
    texts: dict[tuple[str, int], Texts] = {}
    for name, engine in engines.items():
        try:
            engine.wait()
        except RuntimeError as ended:
            print(f"{name}: {ended}")
            continue
        for group in (len(asks), 24, 5, 1) if "invariant" in name else (len(asks), 24, 5):
            job = {"asks": asks, "tokens": options.tokens, "group": group, "texts": True, "ignore_eos": False}
            texts[name, group] = engine.run(**job)["texts"]
        engine.close()
    pairs = [(a, b) for a in texts for b in texts if a[0] == b[0] and a[1] > b[1]]
    pairs += [(("stock", n), ("ours", n)) for n in (len(asks), 24, 5) if {("stock", n), ("ours", n)} <= texts.keys()]
    made, rows = provenance(), []
    for one, other in pairs:
        found = agreement(texts[one], texts[other])
        row = {"one": one[0], "batch": one[1], "other": other[0], "other_batch": other[1], "requests": len(asks)}
        rows.append({**row, **found, **made})
        print(*one, "|", *other, {key: round(value, 4) for key, value in found.items()})
    write_rows(options.out, rows)


if __name__ == "__main__":
    main()
