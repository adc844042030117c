"""The features of recorded requests at all their decision steps, from the class that computes them in the server."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lorazor.features.grid import decision_steps
from lorazor.features.schema import FEATURES
from lorazor.features.signals import ADAPTER_SIGNALS, PROBE_SIGNALS
from lorazor.features.window import Window


@dataclass(frozen=True)
class Decisions:
    """The decision steps of a set of requests, ordered by request and then by step."""

    features: npt.NDArray[np.float32]
    """[D, F] in the order of `FEATURES`; NaN is missing."""
    request: npt.NDArray[np.int64]
    """[D] index of the request."""
    step: npt.NDArray[np.int64]
    """[D] the decision step c; 0 is admission."""


def decision_features(
    signals: npt.ArrayLike,
    probes: npt.ArrayLike,
    lengths: npt.ArrayLike,
    prompt_tokens: npt.ArrayLike,
    max_tokens: npt.ArrayLike,
    mean_output_tokens: npt.ArrayLike,
    probe_interval: int,
) -> Decisions:
    """Push all requests side by side, a step at a time, and read their features at each decision step.

    Args:
        signals: [N, 4] the columns of `ADAPTER_SIGNALS`, a row per decode step, request after request in step order.
        probes: [N, 5] the columns of `PROBE_SIGNALS`, NaN where not probed.
        lengths: [R] output tokens of each never-released request; they sum to N.
        prompt_tokens, max_tokens, mean_output_tokens: [R] or one number for all; the last NaN where not known.
        probe_interval: g, at least 1.

    Raises:
        ValueError: the shapes don't fit each other.
    """
    x = torch.from_numpy(np.ascontiguousarray(signals, dtype=np.float32).reshape(-1, len(ADAPTER_SIGNALS)))
    y = torch.from_numpy(np.ascontiguousarray(probes, dtype=np.float32).reshape(-1, len(PROBE_SIGNALS)))
    length = np.asarray(lengths, dtype=np.int64)
    if not len(x) == len(y) == length.sum():
        raise ValueError(f"signals has {len(x)} rows, probes {len(y)}, and the lengths sum to {length.sum()}")
    steps = {int(n): decision_steps(int(n), probe_interval) for n in np.unique(length)}
    per_request = np.array([len(steps[n]) for n in length.tolist()], dtype=np.int64)
    longest = steps[int(length.max())] if length.size else []
    request = [
        np.broadcast_to(np.asarray(value, dtype=np.float32), length.shape)
        for value in (prompt_tokens, max_tokens, mean_output_tokens)
    ]
    return Decisions(
        features=_replay(x, y, length, per_request, request, longest),
        request=np.repeat(np.arange(len(length)), per_request),
        step=np.array([c for n in length.tolist() for c in steps[n]], dtype=np.int64),
    )


def _replay(
    x: torch.Tensor,
    y: torch.Tensor,
    length: npt.NDArray[np.int64],
    per_request: npt.NDArray[np.int64],
    request: list[npt.NDArray[np.float32]],
    steps: list[int],
) -> npt.NDArray[np.float32]:
    """[D, F]. With the longest request first, those that still run, and those that decide, are always the first few."""
    order = np.argsort(-length, kind="stable")
    first_row = torch.from_numpy((np.cumsum(length) - length)[order])
    first_out = (np.cumsum(per_request) - per_request)[order]
    decisions = -np.sort(-per_request)
    out = np.empty((int(per_request.sum()), len(FEATURES)), dtype=np.float32)
    window = Window(len(length))
    rows = torch.arange(len(length))
    window.reset(rows, *(torch.from_numpy(value[order]) for value in request))
    pushed = 0
    for k, c in enumerate(steps):
        deciding = int(np.searchsorted(-decisions, -k, side="left"))
        while c > 0 and pushed <= c:
            window.push(rows[:deciding], x[first_row[:deciding] + pushed], y[first_row[:deciding] + pushed])
            pushed += 1
        out[first_out[:deciding] + k] = window.features(rows[:deciding]).numpy()
    return out
