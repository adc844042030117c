"""Scores of live requests: each has a row in the feature window, and the policy is asked under guard."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lorazor.features.window import Window
from lorazor.policy.artifact import Artifact
from lorazor.runtime.guard import GuardedScorer

# Scores at admission that are kept: there are as many as there are pairs of prompt length and token limit in use.
KEPT_SCORES = 1 << 14


class Followed:
    """The requests whose signals the policy needs; their windows are here, or on a device that scores them.

    Args:
        capacity: the most requests at once; preempted ones count.
        timeout: seconds that one call of the policy may take.
        on_failure: called with the reason of each failed call.
    """

    def __init__(self, artifact: Artifact, capacity: int, timeout: float, on_failure: Callable[[str], None]) -> None:
        self.capacity = capacity
        self.score = GuardedScorer(artifact.scorer.score, timeout, on_failure)
        self._tasks = artifact.manifest.tasks
        self._window = Window(capacity)
        self._free = list(range(capacity))
        self._rows: dict[str, int] = {}
        self._serials, self._requests = np.full(capacity, -1, np.int32), np.zeros((3, capacity), np.float32)
        self._serial = 0
        # Rows that nothing was pushed to, whose window is not reset yet, and the scores that such windows had.
        self._fresh: set[int] = set()
        self._first_scores: OrderedDict[bytes, float] = OrderedDict()

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._rows

    def start(self, request_id: str, task: str, prompt_tokens: int, max_tokens: int) -> bool:
        """Follow a request from its admission; False if there is no room."""
        if not self._free:
            return False
        row = self._rows[request_id] = self._free.pop()
        self._requests[:, row] = prompt_tokens, max_tokens, self._tasks[task].mean_output_tokens
        self._serials[row] = self._serial
        self._fresh.add(row)
        self._serial = (self._serial + 1) % (1 << 31)
        return True

    def stop(self, request_id: str) -> None:
        """Forget a request that was released or has ended."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free.append(row)

    def push(self, ids: Sequence[str], signals: torch.Tensor, probes: torch.Tensor) -> None:
        """Take in one decode step: signals float32 [n, 4] and probes float32 [n, 5]; other requests are skipped."""
        at = [k for k, request_id in enumerate(ids) if request_id in self._rows]
        if at:
            rows = self._reset([ids[k] for k in at])
            self._fresh.difference_update(rows)
            self._window.push(torch.tensor(rows), signals[at].cpu(), probes[at].cpu())

    def places(self, ids: Sequence[str]) -> NDArray[np.int32]:
        """Each request's row, int32 [n]; -1: not followed."""
        return np.fromiter(map(self._rows.get, ids, repeat(-1)), np.int32, len(ids))

    def windows(self, places: NDArray[np.int32], steps: NDArray[np.integer[Any]]) -> NDArray[np.int32]:
        """Where a device finds the windows of a step's rows: int32 [6, n], what `kernels.window.push` asks for.

        The rows are place (-1: not followed), serial, c, and the bits of prompt_tokens, max_tokens, mean_output_tokens.
        """
        found = np.empty((6, len(places)), np.int32)
        found[0], found[1], found[2] = places, self._serials[places], steps
        found[3:] = self._requests.view(np.int32)[:, places]
        return found

    def scores(self, ids: Sequence[str]) -> dict[str, float | None]:
        """The score of each followed request; None where the policy failed.

        At admission a score depends on the request alone; one that is known is not asked for again.
        """
        keys = {i: self._requests[:, self._rows[i]].tobytes() for i in ids if self._rows[i] in self._fresh}
        known: dict[str, float | None] = {
            i: self._first_scores[key] for i, key in keys.items() if key in self._first_scores
        }
        asked = [i for i in ids if i not in known]
        if asked:
            features = self._window.features(torch.tensor(self._reset(asked))).numpy()
            known |= _by_id(asked, self.score(features))
        for i, key in keys.items():
            self._remember(key, known[i])
        return known

    def _remember(self, key: bytes, score: float | None) -> None:
        if score is not None:
            self._first_scores[key] = score
            self._first_scores.move_to_end(key)
            if len(self._first_scores) > KEPT_SCORES:
                self._first_scores.popitem(last=False)

    def checked(self, scores: Mapping[str, float]) -> dict[str, float | None]:
        """The scores that a device gave; None, counted, where it gave NaN."""
        return _by_id(list(scores), self.score.checked(np.array(list(scores.values()), np.float64)))

    def _reset(self, ids: Sequence[str]) -> list[int]:
        """The rows of these requests, the windows of those that are fresh reset."""
        rows = [self._rows[i] for i in ids]
        fresh = [row for row in rows if row in self._fresh]
        if fresh:
            self._window.reset(torch.tensor(fresh), *torch.from_numpy(self._requests[:, fresh]))
        return rows


def _by_id(ids: Sequence[str], scores: NDArray[np.float64]) -> dict[str, float | None]:
    return {i: None if math.isnan(s) else float(s) for i, s in zip(ids, scores, strict=True)}
