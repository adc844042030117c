"""What the core is told of requests and steps, and what it tells the scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True)
class Admitted:
    """A new request that holds an adapter; `fingerprint` is None where the adapter's files cannot be read."""

    request_id: str
    adapter: str
    fingerprint: str | None
    prompt_tokens: int
    max_tokens: int
    extra_args: Mapping[str, Any] | None


@dataclass(frozen=True)
class Sampled:
    """The rows that sampled a token in this step, in batch order.

    Attributes:
        ids: request ids [n].
        steps: c of each row, output tokens before this step, int [n].
        tokens: chosen tokens int64 [n].
        signals: float32 [n, 4]; NaN where not wanted.
        probes: float32 [n, 5]; NaN where not probed.
    """

    ids: Sequence[str]
    steps: NDArray[np.integer[Any]]
    tokens: torch.Tensor
    signals: torch.Tensor
    probes: torch.Tensor


@dataclass
class StepReport:
    """What one step sends to the scheduler: new requests' arms, new release steps, counter deltas, and the requests
    about which nothing more will be decided."""

    admitted: dict[str, str] = field(default_factory=dict)
    released: dict[str, int] = field(default_factory=dict)
    given_up: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
