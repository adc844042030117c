"""An adapter made by `lorazor finetune` in a real engine: never released, and released after the prompt."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lorazor.training.finetune import finetune
from lorazor.training.finetune_config import finetune_config
from tests.runtime.tiny import Ask, Reference, Tiny, assert_text, engine, run, tokens

pytestmark = pytest.mark.vllm


def test_a_finetuned_adapter_is_served_and_released(tiny: Tiny, tmp_path: Path) -> None:
    """Its greedy text at r = 1 and never is that of plain transformers + PEFT, and the two differ."""
    rows = [{"prompt": f"say {c}{d}:", "reference": f"{d}{c}{d}!"} for c in "abcdef" for d in "uvwxyz"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = finetune_config(
        model=tiny.base, data=[tmp_path / "rows.jsonl"], rank=8, lr=0.02, steps=30, batch=12, patience=0
    )
    finetune(config, tmp_path / "made", mlflow_uri=None)
    made = replace(tiny, adapters={"made": str(tmp_path / "made")})
    reference = Reference(made)
    prompts = [tuple(map(ord, f"say {c}:")) for c in ("aw", "fz", "cc")]
    asks = [Ask(prompt, "made", release, tokens=12) for prompt in prompts for release in (1, "never", None)]
    outputs = list(map(tokens, run(engine(made, {}), made, asks)))
    for ask, output in zip(asks, outputs, strict=True):
        assert_text(output, reference, ask)
    assert outputs[0] != outputs[1]
    assert outputs[1] == outputs[2]
