"""Training targets in the adapter's own words: what it says greedily while it is not released."""

from __future__ import annotations

from typing import Any

import torch

from lorazor.training.finetune_data import IGNORED, Batch, Example, collate


class OwnOutputs:
    """Greedy outputs of the adapter as it is, kept for each example until the next multiple of `refresh` steps.

    Args:
        pad, end: token ids.
        most: the longest output, in tokens.
    """

    def __init__(self, pad: int, end: int, most: int, refresh: int) -> None:
        self._refresh, self._age = refresh, -1
        self._pad, self._known = pad, dict[int, tuple[int, ...]]()
        self._generate = {"do_sample": False, "max_new_tokens": most, "pad_token_id": pad, "eos_token_id": end}
        self._end = end

    def replace(self, model: Any, batch: Batch, step: int) -> Batch:
        """The batch with the adapter's outputs as its targets. The caller has taken any boundary mask off."""
        if step // self._refresh != self._age:
            self._known.clear()
            self._age = step // self._refresh
        indices = batch["index"].tolist()
        prompts = [_prompt(batch, row) for row in range(len(indices))]
        new = [row for row, index in enumerate(indices) if index not in self._known]
        if new:
            self._known.update(zip((indices[r] for r in new), self._say(model, [prompts[r] for r in new]), strict=True))
        examples = [Example(i, prompt, self._known[i]) for i, prompt in zip(indices, prompts, strict=True)]
        device = batch["index"].device
        return {key: value.to(device) for key, value in collate(examples, self._pad).items()}

    @torch.no_grad()
    def _say(self, model: Any, prompts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        width, device = max(map(len, prompts)), next(model.parameters()).device
        tokens = torch.tensor([[self._pad] * (width - len(p)) + list(p) for p in prompts], device=device)
        attention = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        model.eval()
        said = model.generate(input_ids=tokens, attention_mask=attention, **self._generate)
        return [self._until_end(row[width:].tolist()) for row in said]

    def _until_end(self, row: list[int]) -> tuple[int, ...]:
        return tuple(row[: row.index(self._end) + 1] if self._end in row else row)


def _prompt(batch: Batch, row: int) -> tuple[int, ...]:
    asked = batch["attention_mask"][row].bool() & (batch["labels"][row] == IGNORED)
    return tuple(batch["input_ids"][row][asked].tolist())
