"""The examples of `lorazor finetune`: rows in the format of `collect`, as tokens, split, and padded into batches.

A row asks with `prompt` or `messages`, and its right answer is `target`, or `reference` where there is no target.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lorazor.features.errors import InputError
from lorazor.training.collect_data import encode_prompt, read_rows
from lorazor.training.finetune_config import FinetuneConfig

IGNORED = -100  # a label without loss
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Example:
    """A tokenised row; the target ends with the end-of-sequence token."""

    index: int
    prompt: tuple[int, ...]
    target: tuple[int, ...]


@dataclass(frozen=True)
class Examples:
    """What is trained on, and what it is judged by; no prompt of one is in the other if we made the split."""

    train: list[Example]
    validation: list[Example]

    def digest(self) -> str:
        """sha256 over all tokens."""
        tokens = [[(e.prompt, e.target) for e in part] for part in (self.train, self.validation)]
        return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()


def load_examples(config: FinetuneConfig, tokenizer: Any, limit: int) -> Examples:
    """Read, check, tokenise and split.

    Args:
        limit: the most tokens that prompt and target may have together.

    Raises:
        InputError: a file or a row is wrong (names file and line), or a part of the split would be empty.
    """
    train = [example for path in config.data for example in _read(path, tokenizer, limit)]
    if config.validation is not None:
        held = _read(config.validation, tokenizer, limit)
    else:
        train, held = _split(train, config.validation_share)
    return Examples(*([Example(i, *pair) for i, pair in enumerate(part)] for part in (train, held)))


Pair = tuple[tuple[int, ...], tuple[int, ...]]  # prompt, target


def _read(path: Path, tokenizer: Any, limit: int) -> list[Pair]:
    pairs = [_encode(row, where, tokenizer, limit) for row, where in read_rows(path)]
    if not pairs:
        raise InputError(f"{path}: holds no request")
    return pairs


def _encode(row: dict[str, Any], where: str, tokenizer: Any, limit: int) -> Pair:
    key = "target" if "target" in row else "reference"
    text = row.get(key)
    if not isinstance(text, str) or not text.strip():
        raise InputError(f'{where}: "{key}" must be a text that is not empty, got {text!r}')
    try:
        prompt = encode_prompt(tokenizer, row)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    target = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    if not prompt or len(prompt) + len(target) > limit:
        raise InputError(
            f"{where}: a prompt of {len(prompt)} tokens and a target of {len(target)} must make at most {limit} "
            "together (--max-length, or what the base takes)"
        )
    return tuple(prompt), tuple(target)


def _split(pairs: list[Pair], share: float) -> tuple[list[Pair], list[Pair]]:
    """Hold out this share of the distinct prompts, at least one if any, with all of their targets.

    Which ones follows from the prompts alone, so every run over the same file holds out the same.
    """
    ranked = sorted({prompt for prompt, _ in pairs}, key=lambda prompt: hashlib.sha256(str(prompt).encode()).digest())
    held = set(ranked[: ceil(share * len(ranked))])
    if len(held) == len(ranked):
        raise InputError(f"{len(ranked)} distinct prompts are too few to hold out {share:g} of them for validation")
    return [p for p in pairs if p[0] not in held], [p for p in pairs if p[0] in held]


def collate(examples: Sequence[Example], pad: int) -> Batch:
    """Right-padded input_ids, attention_mask and labels, int64 [batch, tokens], and index, int64 [batch]."""
    width = max(len(e.prompt) + len(e.target) for e in examples)
    batch = {
        "input_ids": torch.full((len(examples), width), pad),
        "attention_mask": torch.zeros((len(examples), width), dtype=torch.int64),
        "labels": torch.full((len(examples), width), IGNORED),
        "index": torch.tensor([e.index for e in examples]),
    }
    for row, example in enumerate(examples):
        start, end = len(example.prompt), len(example.prompt) + len(example.target)
        batch["input_ids"][row, :end] = torch.tensor([*example.prompt, *example.target])
        batch["attention_mask"][row, :end] = 1
        batch["labels"][row, start:end] = torch.tensor(example.target)
    return batch


def positions(attention_mask: Tensor) -> Tensor:
    """int64 [batch, tokens]: each token's place in its own sequence, whichever side the padding is on."""
    return (attention_mask.cumsum(1) - 1).clamp(min=0)


def target_tokens(labels: Tensor) -> Tensor:
    """int64 [batch]: the length of each target, its end token included."""
    return (labels != IGNORED).sum(1)


def boundaries(batch: Batch, releases: Tensor) -> Tensor:
    """int64 [batch]: prompt length + r - 1, for release steps r, int64 [batch]."""
    prompt_tokens = batch["attention_mask"].sum(1) - target_tokens(batch["labels"])
    return prompt_tokens + releases - 1
