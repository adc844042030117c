"""An engine whose outputs are a pure function of the run: for what `collect` does around an engine, not for vLLM.

Tokens come from a hash of prompt, weights and position, so a released run follows the trace up to its release step and
leaves it then. `python fake_engine.py CONFIG OUT [resume]` collects with it, slowly enough to be killed.
"""

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from lorazor.training.collect import collect
from lorazor.training.collect_engine import Output, Run, Signals

BATCH = 3


def number(*parts: Any) -> int:
    """A stable hash of anything."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big")


def tokens_of(run: Run, adapter: str | None, release: Any) -> tuple[int, ...]:
    """Tokens of a run; its length is 5 to max_tokens and depends on prompt and weights."""
    length = 5 + number(run.prompt, adapter) % (run.max_tokens - 4)
    adapted = length if release == "never" else release or 0
    return tuple(number(run.prompt, adapter if k < adapted else None, k) % 100 for k in range(length))


class FakeEngine:
    """Finishes a few runs a step."""

    max_model_len = 64

    def __init__(self, pause: float = 0.0, drifting: dict[tuple[int, int], int] | None = None, ignores: bool = False):
        """`drifting`: (first prompt token, r) -> how many attempts give a wrong first token."""
        self.pause, self.drifting, self.ignores = pause, dict(drifting or {}), ignores
        self.queue: list[Run] = []
        self.done: dict[str, Signals] = {}
        self.submitted: list[Run] = []
        self.widest = 0
        self.unreadable = False

    def encode(self, row: dict[str, Any]) -> tuple[int, ...]:
        """A prompt's tokens are its characters."""
        return tuple(ord(c) for c in row.get("prompt", ""))

    def submit(self, run: Run) -> None:
        """Queue the run."""
        self.queue.append(run)
        self.submitted.append(run)

    def step(self) -> list[Output]:
        """Finish the first few runs of the queue."""
        time.sleep(self.pause)
        self.widest = max(self.widest, len(self.queue))
        batch, self.queue = self.queue[:BATCH], self.queue[BATCH:]
        return [self._finish(run) for run in batch]

    def _finish(self, run: Run) -> Output:
        tokens = tokens_of(run, run.adapter, run.release)
        if run.release == "never":
            values = np.array([[number(run.prompt, k, j) / 2**32 for j in range(9)] for k in range(len(tokens))])
            values[:, 6] = values[:, 6] > 0.5
            values[:, [3, 7]] *= -1
            values[:, 5] *= 0.6
            signals = values.astype(np.float32)
            self.done[run.key] = Signals(np.array(tokens, np.int32), signals[:, :4], signals[:, 4:])
        left = self.drifting.get((run.prompt[0], run.release if isinstance(run.release, int) else -1), 0)
        if left:
            self.drifting[run.prompt[0], int(str(run.release))] = left - 1
            tokens = (101, *tokens[1:])
        told = None if self.ignores or run.release == "never" else run.release
        text = " ".join(map(str, tokens))
        return Output(run.key, text, tokens, "stop", told)

    def text_of(self, run: Run, tokens: tuple[int, ...], finish_reason: str) -> str:
        """Numbers with blanks, as in outputs, unless this tokenizer is one that reads them otherwise."""
        return " ".join(map(str, tokens)) + ("?" if self.unreadable else "")

    def take_signals(self, keys: list[str]) -> dict[str, Signals]:
        """Hand the signals out once."""
        return {key: self.done.pop(key) for key in keys if key in self.done}

    def reset(self) -> None:
        """Forget untaken signals."""
        self.done.clear()


def make_collection(folder: Path, requests: int = 7, **settings: Any) -> Path:
    """A base and two adapters of a few bytes, two tasks, and the YAML file that collects them."""
    for name, config in {"base": "config.json", "a": "adapter_config.json", "b": "adapter_config.json"}.items():
        (folder / name).mkdir(parents=True)
        (folder / name / config).write_text(json.dumps({"r": 4}))
        weights = "model.safetensors" if name == "base" else "adapter_model.safetensors"
        save_file({"w": torch.full((2, 2), float(number(name)))}, folder / name / weights)
    for task in ("one", "two"):
        rows = [{"prompt": f"{task} {k}", "reference": str(k)} for k in range(requests)]
        (folder / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = {
        task: {"adapter": adapter, "data": f"{task}.jsonl", "scorer": "rouge_l", "max_tokens": 20}
        for task, adapter in (("one", "a"), ("two", "b"))
    }
    whole: dict[str, Any] = {
        "base": "base",
        "adapters": {"a": "a", "b": "b"},
        "tasks": tasks,
        "probe_interval": 4,
        "shard_size": 3,
    }
    path = folder / "collect.yaml"
    path.write_text(json.dumps({**whole, **settings}))  # JSON is YAML
    return path


if __name__ == "__main__":
    collect(sys.argv[1], sys.argv[2], resume="resume" in sys.argv, engine=lambda config: FakeEngine(pause=0.03))
