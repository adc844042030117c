"""Steps that overlap: what is known of one before its tokens are read, and the decisions that come with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.outputs import AsyncModelRunnerOutput


@dataclass(frozen=True)
class Pending:
    """A step whose tokens the host does not have yet: requests, c of each, whose scores are due, what comes home.

    Due, each with its row, are the requests that were probed or, where the policy has no probes, all that it follows
    and that are at a decision step. What comes home is scores float64 [n] where the policy is on the device, else
    signals and probes; empty where nobody asks, None where it was lost.
    """

    ids: list[str]
    steps: NDArray[np.integer[Any]]
    due: dict[str, int]
    home: tuple[torch.Tensor, ...] | None


class ReleasingOutput(AsyncModelRunnerOutput):
    """vLLM's output of a step; with the tokens come the decisions."""

    def __init__(self, inner: Any, finish: Callable[[Any], Any]) -> None:
        self._inner, self._finish = inner, finish

    def get_output(self) -> Any:
        """Wait for the tokens, as vLLM does, then decide."""
        return self._finish(self._inner.get_output())
