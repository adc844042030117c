"""Stage `diagnose`: what an adapter loses when it is released, token by token (transformers + PEFT, no vLLM).

The adapter's own greedy output is forced through the released path. Under greedy decoding an output without a changed
argmax comes out the same when released, so their share is the ceiling; the first flip says what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from lorazor.training.boundary_mask import BoundaryMask
from lorazor.training.collect_data import encode_prompt, read_rows
from lorazor.training.finetune_data import IGNORED, Batch, Example, boundaries, collate, positions, target_tokens
from lorazor.training.finetune_model import load_tokenizer
from lorazor.training.finetune_own import OwnOutputs
from lorazor.training.study.layout import TEST, Cell, Layout
from lorazor.training.study.results import Results

Row = dict[str, Any]


@dataclass(frozen=True)
class Diagnosis:
    """What is looked at: the first `requests` of the test part, released at `release`."""

    requests: int = 256
    release: int = 1
    batch: int = 32
    most_tokens: int = 256


def diagnose(
    layout: Layout, base: Path, cells: Sequence[Cell], how: Diagnosis, progress: Callable[[str], None]
) -> None:
    """Add a row per request of every cell to diagnosis.csv."""
    table = Results(layout.csv("diagnosis"))
    for cell in cells:
        key = {**cell.row(), "release": how.release}
        if not table.has(key):
            progress(f"diagnose: {cell}")
            rows = list(examined(base, layout.adapter(cell), layout.part(cell.task, TEST), how))
            table.add({**key, **row} for row in rows)


def examined(base: Path, adapter: Path, requests: Path, how: Diagnosis) -> Iterator[Row]:
    """A row per request, in the order of the file."""
    tokenizer, model = load_tokenizer(base), load_adapter(base, adapter)
    mask, end = BoundaryMask(model), tokenizer.eos_token_id
    pad = end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    own = OwnOutputs(pad, end, how.most_tokens, refresh=1)
    rows = [row for row, _ in read_rows(requests)][: how.requests]
    # `collate` wants a target; the adapter's own output takes its place.
    asked = [Example(i, tuple(encode_prompt(tokenizer, row)), (end,)) for i, row in enumerate(rows)]
    for first in range(0, len(asked), how.batch):
        examples = asked[first : first + how.batch]
        mask.clear()
        batch = {key: value.to(model.device) for key, value in collate(examples, pad).items()}
        yield from compared(model, mask, own.replace(model, batch, 0), how.release, tokenizer)


def load_adapter(base: Path, adapter: Path) -> Any:
    """Base and adapter, ready to decode, on the GPU if there is one."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype).to(device)
    return PeftModel.from_pretrained(model, adapter).eval()


@torch.inference_mode()
def compared(model: Any, mask: BoundaryMask, batch: Batch, release: int, tokenizer: Any) -> Iterator[Row]:
    """The rows of one batch whose labels are the adapter's own outputs."""
    lengths = target_tokens(batch["labels"])
    paths = {
        "adapter": _target_logits(model, mask, batch, lengths),
        "released": _target_logits(model, mask, batch, lengths.clamp(max=release)),
        "base": _target_logits(model, mask, batch, None),
    }
    row_of, column = (batch["labels"][:, 1:] != IGNORED).nonzero(as_tuple=True)
    tokens = batch["labels"][row_of, column + 1]
    # Against the adapter's argmax under forcing: batching alone may move a near tie of the generated text.
    flips = paths["adapter"].argmax(-1) != paths["released"].argmax(-1)
    for row in range(len(lengths)):
        mine = row_of == row
        yield {**_first_flip(tokens[mine], flips[mine], tokenizer), **_log_probabilities(paths, tokens, mine, release)}


def _target_logits(model: Any, mask: BoundaryMask, batch: Batch, releases: Tensor | None) -> Tensor:
    """float32 [targets, V] under a mask at `releases`; None: without the adapter."""
    places = positions(batch["attention_mask"])
    limit = torch.zeros_like(places[:, 0]) if releases is None else boundaries(batch, releases)
    mask.set(places, limit)
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "position_ids": places}
    logits = model(**inputs, use_cache=False).logits[:, :-1]
    mask.clear()
    wanted: Tensor = logits[batch["labels"][:, 1:] != IGNORED]
    return wanted.float()


def _first_flip(tokens: Tensor, flips: Tensor, tokenizer: Any) -> Row:
    where = flips.nonzero().flatten()
    found: Row = {"tokens": len(tokens), "flips": len(where), "first_flip": None, "token_class": None}
    if len(where):
        at = int(where[0])
        found |= {"first_flip": at, "token_class": token_class(tokenizer, int(tokens[at]))}
    return found


def _log_probabilities(paths: dict[str, Tensor], tokens: Tensor, mine: Tensor, release: int) -> Row:
    """The mean log-probability of the tokens past the boundary under each path; none where there is no such token."""
    picked = mine.nonzero().flatten()[release:]
    if not len(picked):
        return {}
    chosen = tokens[picked][:, None]
    return {
        f"logprob_{name}": float(log_softmax(logits[picked], -1).gather(1, chosen).mean())
        for name, logits in paths.items()
    }


def token_class(tokenizer: Any, token: int) -> str:
    """end, space, digits, punctuation, a word's start, or the rest of a word."""
    if token == tokenizer.eos_token_id:
        return "end"
    text = tokenizer.decode([token])
    bare = text.strip()
    if not bare:
        return "space"
    if bare.isdigit():
        return "digits"
    if not any(c.isalnum() for c in bare):
        return "punctuation"
    return "word start" if text[0].isspace() else "word rest"
