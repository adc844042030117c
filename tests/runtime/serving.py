"""What the serving tests stand on: a tiny model that a server can load, and a small real policy for it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from lorazor.features.schema import FEATURES, SCHEMA_HASH
from lorazor.policy.artifact import Artifact, save_artifact
from lorazor.policy.fingerprint import fingerprint
from lorazor.policy.manifest import AdapterEntry, Guarantee, Manifest, TaskPolicy
from tests.runtime.tiny import VOCAB, Tiny

PROBE_INTERVAL = 8
LEARNED_STEP = 16
"""The policy of `make_policy` says "safe" from this decode step on, and "unsafe" before."""
CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def add_tokenizer(base: str) -> None:
    """Give the tiny model a tokenizer of one token per ASCII character, and a chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({chr(code): code for code in range(VOCAB)}, unk_token="\x00"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="\x00")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(base)


def make_policy(folder: Path, tiny: Tiny, thresholds: dict[str, float | None]) -> Artifact:
    """A policy artifact for the tiny model that knows adapter "a" with the first task of `thresholds`."""
    guarantee = Guarantee(kind="relative", max_drop=0.05, confidence=0.9, n=500, loss=0.01, bound=0.04)
    manifest = Manifest(
        schema_hash=SCHEMA_HASH,
        features=list(FEATURES),
        probe_interval=PROBE_INTERVAL,
        base_fingerprint=fingerprint(tiny.base),
        adapters=[
            AdapterEntry(name="trained-as-a", fingerprint=fingerprint(tiny.adapters["a"]), task=next(iter(thresholds)))
        ],
        tasks={
            task: TaskPolicy(threshold=threshold, mean_output_tokens=40.0, guarantee=guarantee if threshold else None)
            for task, threshold in thresholds.items()
        },
    )
    return save_artifact(folder, manifest, model_text())


def model_text() -> str:
    """A LightGBM that has learned nothing but the step."""
    import lightgbm

    rng = np.random.default_rng(0)
    rows = rng.normal(size=(2000, len(FEATURES)))
    step = rng.integers(0, 64, size=len(rows))
    rows[:, FEATURES.index("step")] = step
    data = lightgbm.Dataset(rows, label=step >= LEARNED_STEP, feature_name=list(FEATURES))
    settings = {"objective": "binary", "verbose": -1, "num_threads": 1, "deterministic": True}
    return str(lightgbm.train(settings, data, num_boost_round=40).model_to_string())


def write_adapter_folder(folder: Path, *, config: object = None, weights: bool = True) -> str:
    """An adapter folder that passes for one until its weights are read."""
    folder.mkdir(parents=True)
    if config is not None:
        (folder / "adapter_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if weights:
        (folder / "adapter_model.safetensors").write_bytes(b"")
    return str(folder)
