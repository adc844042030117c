"""Scores of live requests: each has a row in the feature window, and the policy is asked under guard."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from lorazor.features.window import Window
from lorazor.policy.artifact import Artifact
from lorazor.runtime.guard import GuardedScorer


class Followed:
    """The requests whose signals the policy needs.

    Args:
        capacity: the most requests at once; preempted ones count.
        timeout: seconds that one call of the policy may take.
        on_failure: called with the reason of each failed call.
    """

    def __init__(self, artifact: Artifact, capacity: int, timeout: float, on_failure: Callable[[str], None]) -> None:
        self.score = GuardedScorer(artifact.scorer.score, timeout, on_failure)
        self._tasks = artifact.manifest.tasks
        self._window = Window(capacity)
        self._free = list(range(capacity))
        self._rows: dict[str, int] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._rows

    def start(self, request_id: str, task: str, prompt_tokens: int, max_tokens: int) -> bool:
        """Follow a request from its admission; False if there is no room."""
        if not self._free:
            return False
        row = self._rows[request_id] = self._free.pop()
        self._window.reset(torch.tensor([row]), prompt_tokens, max_tokens, self._tasks[task].mean_output_tokens)
        return True

    def stop(self, request_id: str) -> None:
        """Forget a request that was released or has ended."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free.append(row)

    def push(self, ids: Sequence[str], signals: torch.Tensor, probes: torch.Tensor) -> None:
        """Take in one decode step: signals float32 [n, 4] and probes float32 [n, 5] of n followed requests."""
        self._window.push(self._index(ids), signals.cpu(), probes.cpu())

    def scores(self, ids: Sequence[str]) -> dict[str, float | None]:
        """The score of each followed request; None where the policy failed."""
        if not ids:
            return {}
        scores = self.score(self._window.features(self._index(ids)).numpy())
        return {i: None if math.isnan(s) else float(s) for i, s in zip(ids, scores, strict=True)}

    def _index(self, ids: Sequence[str]) -> torch.Tensor:
        return torch.tensor([self._rows[i] for i in ids])
