"""What `throughput.py` serves: a base of the Llama-3.1-8B shape without weights, random adapters, and a policy."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from forest import make_scorer_text
from safetensors.torch import save_file

from lorazor.features.schema import FEATURES, SCHEMA_HASH
from lorazor.policy.artifact import save_artifact
from lorazor.policy.fingerprint import fingerprint
from lorazor.policy.manifest import AdapterEntry, Manifest, TaskPolicy

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
    """A model folder with weights in name only: vLLM makes its own, and a policy wants something to know it by."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file({"nothing": torch.zeros(1)}, folder / "model.safetensors")
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


def make_policy(
    folder: Path, base: Path, adapters: list[Path], interval: int, output: int, probes: bool = True
) -> Path:
    """A policy of 200 trees that asks for probes, or does without, and never releases anybody."""
    manifest = Manifest(
        schema_hash=SCHEMA_HASH,
        features=list(FEATURES),
        probe_interval=interval,
        probes=probes,
        base_fingerprint=fingerprint(base),
        adapters=[AdapterEntry(name=path.name, fingerprint=fingerprint(path), task="any") for path in adapters],
        tasks={"any": TaskPolicy(threshold=1.0, mean_output_tokens=float(output))},
    )
    save_artifact(folder, manifest, make_scorer_text(probes=probes))
    return folder
