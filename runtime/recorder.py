"""Keeps the signals of never-released requests until `lorazor collect` fetches them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass
class _Trace:
    tokens: list[int] = field(default_factory=list)
    signals: list[NDArray[np.float32]] = field(default_factory=list)
    probes: list[NDArray[np.float32]] = field(default_factory=list)


class Recorder:
    """Signals per request id, a row per sampled token."""

    def __init__(self) -> None:
        self._traces: dict[str, _Trace] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._traces

    def start(self, request_id: str) -> None:
        """Record this request from its first token."""
        self._traces[request_id] = _Trace()

    def push(self, ids: Sequence[str], tokens: torch.Tensor, signals: torch.Tensor, probes: torch.Tensor) -> None:
        """Append one step: tokens int64[n], signals float32[n, 4], probes float32[n, 5]; other requests are skipped."""
        if not self._traces:
            return
        host_signals, host_probes = signals.cpu().numpy(), probes.cpu().numpy()
        for k, request_id in enumerate(ids):
            trace = self._traces.get(request_id)
            if trace is not None:
                trace.tokens.append(int(tokens[k]))
                trace.signals.append(host_signals[k])
                trace.probes.append(host_probes[k])

    def take(self, ids: Iterable[str] | None) -> dict[str, dict[str, Any]]:
        """Return and forget: {id: {"token_ids": int32[L], "signals": float32[L, 4], "probes": float32[L, 5]}}."""
        wanted = list(self._traces) if ids is None else [i for i in ids if i in self._traces]
        return {request_id: _arrays(self._traces.pop(request_id)) for request_id in wanted}


def _arrays(trace: _Trace) -> dict[str, Any]:
    return {
        "token_ids": np.asarray(trace.tokens, np.int32),
        "signals": np.asarray(trace.signals, np.float32).reshape(-1, 4),
        "probes": np.asarray(trace.probes, np.float32).reshape(-1, 5),
    }
