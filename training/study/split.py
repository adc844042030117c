"""Stage `split`: the items of each task, divided by prompt, so that no prompt is in two parts.

Policy parts hold a prompt once; adapter parts hold it with all of its targets. A prompt's place follows from the hash
of seed, task and prompt, so neither order nor other tasks change it.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorazor.features.errors import InputError
from lorazor.training.provenance import atomic_write_text
from lorazor.training.study.layout import ADAPTER_TRAIN, ADAPTER_VALIDATION, CALIBRATE, POLICY_TRAIN, TEST, Layout
from lorazor.training.study.results import Results
from lorazor.training.study.taskdata import load_items

Items = list[dict[str, Any]]
ID_DIGITS = 16  # hex digits of a prompt's hash: 64 bits


@dataclass(frozen=True)
class Sizes:
    """How many prompts each part should have; where a task has too few, `shares` says who gives way."""

    policy_train: int = 1000
    calibrate: int = 4000
    test: int = 1000
    validation: int = 300
    adapter_share: float = 0.4
    calibrate_least: int = 1000

    def of(self, prompts: int, task: str) -> dict[str, int]:
        """The parts' sizes, which sum to `prompts`.

        At least `adapter_share` of the prompts stay with the adapter. If the policy's parts do not fit into the rest
        they shrink alike, except that calibration keeps `calibrate_least`.

        Raises:
            InputError: not even that fits.
        """
        room = prompts - int(self.adapter_share * prompts)
        scale = min(1.0, room / (self.policy_train + self.calibrate + self.test))
        calibrate = min(self.calibrate, max(self.calibrate_least, int(scale * self.calibrate)))
        scale = min(1.0, (room - calibrate) / (self.policy_train + self.test))
        train, test = int(scale * self.policy_train), int(scale * self.test)
        adapter = prompts - calibrate - train - test
        validation = min(self.validation, adapter // 10)
        if min(train, test, validation) < 1:
            raise InputError(
                f"task {task!r}: {prompts} distinct prompts are too few for {self.calibrate_least} to calibrate, "
                f"{self.adapter_share:.0%} for the adapter, and some to train and to test the policy"
            )
        return {
            **{POLICY_TRAIN: train, CALIBRATE: calibrate, TEST: test},
            **{ADAPTER_VALIDATION: validation, ADAPTER_TRAIN: adapter - validation},
        }


def split(
    data: Path, layout: Layout, tasks: Iterable[str], *, sizes: Sizes, seed: int, progress: Callable[[str], None]
) -> None:
    """Write the parts of every task, and their sizes into split.csv; tasks that are there are left alone."""
    table = Results(layout.csv("split"))
    for task in tasks:
        if table.has({"task": task}):
            continue
        progress(f"split: {task}")
        parts = divide(load_items(data, task), task, sizes, seed)
        for part, items in parts.items():
            lines = [json.dumps(_row(item), ensure_ascii=False) + "\n" for item in items]
            atomic_write_text(layout.part(task, part), "".join(lines))
        table.add(_described(task, parts, seed))


def divide(items: Items, task: str, sizes: Sizes, seed: int) -> dict[str, Items]:
    """The items of each part, in an order that the seed fixes."""
    by_prompt: dict[str, Items] = defaultdict(list)
    for item in items:
        by_prompt[item["prompt"]].append(item)
    ranked = sorted(by_prompt, key=lambda prompt: hashlib.sha256(f"{seed}/{task}/{prompt}".encode()).digest())
    parts, first = {}, 0
    for part, count in sizes.of(len(ranked), task).items():
        taken, first = ranked[first : first + count], first + count
        whole = part in (ADAPTER_TRAIN, ADAPTER_VALIDATION)
        parts[part] = [item for prompt in taken for item in by_prompt[prompt][: None if whole else 1]]
    return parts


def _row(item: Mapping[str, Any]) -> dict[str, Any]:
    """As `lorazor finetune` and `lorazor collect` read it: a chat of one message, the target, and the scorer's keys."""
    rest = {key: value for key, value in item.items() if key != "prompt"}
    name = hashlib.sha256(item["prompt"].encode()).hexdigest()[:ID_DIGITS]
    return {"id": name, "messages": [{"role": "user", "content": item["prompt"]}], **rest}


def _described(task: str, parts: Mapping[str, Items], seed: int) -> list[dict[str, Any]]:
    return [
        {"task": task, "part": part, "prompts": len({i["prompt"] for i in items}), "rows": len(items), "seed": seed}
        for part, items in parts.items()
    ]
