"""Counters of one worker: totals for the status endpoint, deltas for the scheduler to ship to Prometheus."""

from __future__ import annotations

from collections import Counter
from typing import Any

from lorazor.runtime.metrics import decode_delta, encode_delta

FAILURES = "lorazor_policy_failures_total"


class Counters:
    """Counts by metric name and labels; the caller keeps the number of distinct labels bounded."""

    def __init__(self) -> None:
        self._totals: Counter[str] = Counter()
        self._deltas: Counter[str] = Counter()
        self._keys: dict[tuple[str, ...], str] = {}

    def add(self, name: str, by: int = 1, **labels: str) -> None:
        """Add to a counter."""
        known = (name, *labels, *labels.values())
        key = self._keys.get(known) or self._keys.setdefault(known, encode_delta(name, labels))
        self._totals[key] += by
        self._deltas[key] += by

    def add_failures(self, reason: str, by: int = 1) -> None:
        """Count decisions that failed, whose requests keep their adapters."""
        self.add(FAILURES, by, reason=reason)

    def take(self) -> dict[str, int]:
        """What was added since the last call, by encoded key."""
        deltas, self._deltas = self._deltas, Counter()
        return dict(deltas)

    def totals(self) -> list[list[Any]]:
        """Rows [name, labels, total]."""
        return [[*decode_delta(key), count] for key, count in sorted(self._totals.items())]
