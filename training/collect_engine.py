"""What a collection needs of an engine: submit runs, step, and fetch the signals of the never-released ones.

`Engine` is all that the rest of `collect` knows of vLLM; collect_vllm.py has the real one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from lorazor.training.config import Sampling

Release = int | Literal["never"]


@dataclass(frozen=True)
class Run:
    """One pass of a request through the engine; `adapter` None is the base alone, `seed` None is greedy.

    `prefix`: output tokens that are given instead of generated. `release` and `max_tokens` count them too.
    """

    key: str
    prompt: tuple[int, ...]
    adapter: str | None
    release: Release | None
    max_tokens: int
    sampling: Sampling
    seed: int | None
    prefix: tuple[int, ...] = ()


@dataclass(frozen=True)
class Output:
    """What a run ended with, its prefix included; `release_step` is what the runtime says it did."""

    key: str
    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    release_step: int | None


@dataclass(frozen=True)
class Signals:
    """Of a never-released run: tokens int32[L], signals float32[L, 4], probes float32[L, 5] (NaN = unprobed)."""

    tokens: npt.NDArray[np.int32]
    signals: npt.NDArray[np.float32]
    probes: npt.NDArray[np.float32]


class Engine(Protocol):
    """Continuous batching over submitted runs. Keys are the caller's and unique among unfinished runs."""

    max_model_len: int

    def encode(self, row: dict[str, Any]) -> tuple[int, ...]:
        """The prompt tokens of a row's `prompt` or `messages`."""

    def submit(self, run: Run) -> None:
        """Queue a run; they start in this order."""

    def step(self) -> list[Output]:
        """Run one step of the batch and return what finished in it."""

    def text_of(self, run: Run, tokens: tuple[int, ...], finish_reason: str) -> str:
        """The text of all output tokens of a run whose stop strings have one character each."""

    def take_signals(self, keys: list[str]) -> dict[str, Signals]:
        """Return and forget the signals of finished never-released runs."""

    def reset(self) -> None:
        """Forget cached prefixes and untaken signals, so that what follows does not depend on what came before."""
