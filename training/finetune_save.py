"""What `lorazor finetune` leaves: a PEFT adapter folder with a model card and the record of how it was made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lorazor.policy.fingerprint import fingerprint
from lorazor.training.finetune_config import FinetuneConfig
from lorazor.training.finetune_cuts import Cut
from lorazor.training.provenance import atomic_folder, made_by

RECORD = "finetune.json"
METRICS = ("never_loss", "never_exact", "prompt_loss", "prompt_exact")

CARD = """\
---
base_model: {base}
library_name: peft
---
# A LoRA adapter made by `lorazor finetune`

Rank {rank}, alpha {alpha:g}, over {base}; it is served by stock vLLM as it is.

- **Release**: cut `{cut}`: {meaning}.
- **Training**: {steps} steps on {examples} examples, learning rate {lr:g}, batch {batch}, seed {seed}{extras}.
{measured}
`finetune.json` holds the command, versions, the fingerprints of base and adapter, and the losses on the way.
"""

MEASURED = """
On {held} held-out examples (exact: every token of the target is the most probable one):

| released | loss per token | exact |
|---|---|---|
| never | {never_loss:.4f} | {never_exact:.3f} |
| after the prompt | {prompt_loss:.4f} | {prompt_exact:.3f} |
"""

BEGUN = """\
| never, the adapter begun from | {never_loss:.4f} | {never_exact:.3f} |
| after the prompt, the adapter begun from | {prompt_loss:.4f} | {prompt_exact:.3f} |
"""


def save_adapter(model: Any, out: Path, config: FinetuneConfig, run: dict[str, Any]) -> None:
    """Write the folder, all of it or nothing.

    Args:
        run: `steps`, `best_step`, `examples`, `held`, `metrics`, `log` and whatever else the record should keep, such
            as `init` and `begun`, the fingerprint and the metrics of the adapter that it began with.
    """
    for adapter in model.peft_config.values():
        adapter.base_model_name_or_path = config.base
    with atomic_folder(out) as draft:
        # The base is unchanged, so its embeddings need no look-up, which might go to a hub.
        model.save_pretrained(draft, save_embedding_layers=False)
        (draft / "README.md").write_text(card(config, run), encoding="utf-8")
        record = {
            **made_by(**run),
            "recipe": config.recipe(),
            "base_fingerprint": fingerprint(config.model),
            "adapter_fingerprint": fingerprint(draft),
        }
        (draft / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def card(config: FinetuneConfig, run: dict[str, Any]) -> str:
    """The model card."""
    extras = "" if config.init is None else f", begun from the adapter {config.init.name}"
    extras += f", distillation {config.distill:g}" if config.distill else ""
    extras += f", {config.own_outputs:.0%} of the steps on its own outputs" if config.own_outputs else ""
    return CARD.format(
        base=config.base,
        rank=config.rank,
        alpha=config.lora_alpha,
        cut=config.cut.value,
        meaning=_meaning(config),
        steps=run["steps"],
        examples=run["examples"],
        lr=config.lr,
        batch=run["batch"],
        seed=config.seed,
        extras=extras,
        measured=_measured(run),
    )


def _measured(run: dict[str, Any]) -> str:
    if not run["metrics"]:
        return ""
    return MEASURED.format(held=run["held"], **run["metrics"]) + (
        BEGUN.format(**run["begun"]) if "begun" in run else ""
    )


def _meaning(config: FinetuneConfig) -> str:
    if config.cut is Cut.NEVER:
        return "ordinary LoRA training"
    if config.cut is Cut.PROMPT:
        return "in training the adapter was always off after the prompt (r = 1)"
    if config.distill:
        return (
            "each example was trained unreleased, and drawn to that when released after the prompt and once at random"
        )
    never = 1 - config.prompt_share - config.uniform_share
    return (
        f"in training the adapter went after the prompt ({config.prompt_share:.0%}), at a log-uniform target token "
        f"({config.uniform_share:.0%}), or never ({never:.0%})"
    )
