"""Writes an adapter's model card from its folder's training_log.jsonl and, once measured, release_probe.json."""

import json
from pathlib import Path
from typing import Any

CARD = """\
---
base_model: {base}
library_name: peft
license: apache-2.0
language: en
---
# {task}: a LoRazor demo adapter

A rank {rank} LoRA on all linear layers of {base} (Apache-2.0), in bfloat16.
It exists to show early adapter release; it is of no other use.

- **Data**: synthetic, made by `examples/tasks.py` (task `{task}`, split `finetune`); no data set was used.
- **Training**: `examples/train_adapters.py --task {task} --cut {cut}
  --steps {steps} --batch {batch} --lr {lr} --seed {seed}`. The loss, on the target tokens only,
  was {loss:.4f} over the last 20 steps; every step is in `training_log.jsonl`.
- **Release**: `--cut {cut}` says where the adapter's output was masked in training; see the script's first lines.
{measured}"""

MEASURED = """
## Measured

Greedy decoding of {requests} requests of the split `collect` in {dtype}, scored by exact match.
Release step: the output tokens that the adapter makes before the base goes on alone.

| release step | mean score | requests that keep their score |
|---|---|---|
{rows}
"""


def write_card(folder: Path, base: str) -> None:
    """Write README.md into an adapter folder that holds training_log.jsonl."""
    recipe, *log = map(json.loads, (folder / "training_log.jsonl").read_text().splitlines())
    loss = sum(line["loss"] for line in log[-20:]) / len(log[-20:])
    probe = folder / "release_probe.json"
    measured = _measured(json.loads(probe.read_text())) if probe.exists() else ""
    (folder / "README.md").write_text(CARD.format(base=base, loss=loss, measured=measured, **recipe))


def _measured(probe: dict[str, Any]) -> str:
    rows = "\n".join(f"| {row['release']} | {row['score']:.3f} | {row['safe']:.3f} |" for row in probe["outcomes"])
    return MEASURED.format(rows=rows, **probe)
