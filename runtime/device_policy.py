"""The policy on the device: windows and forest follow the signals there, and only scores travel home.

Nothing here waits for the device. Decisions at admission stay with the host, which has all they need.
"""

from __future__ import annotations

import logging
import math

import numpy as np
import torch

from lorazor.kernels import forest, window
from lorazor.policy.forest import Forest
from lorazor.runtime.core import ReleaseCore
from lorazor.runtime.step_plan import StepPlan
from lorazor.runtime.step_signals import step_signals

logger = logging.getLogger("vllm.lorazor")


class DevicePolicy:
    """Windows of up to `capacity` requests, and the trees that score them.

    A step that vLLM made, dropped after a preemption and made again counts once, as `kernels.window` explains.

    Raises:
        ValueError: the forest does not fit the kernels' records.
    """

    def __init__(self, trees: Forest, capacity: int, device: torch.device) -> None:
        self._trees = forest.pack(**vars(trees), device=device)
        self._state = torch.zeros((capacity, window.STATE), dtype=torch.float32, device=device)
        self._owners = torch.full((capacity,), -1, dtype=torch.int32, device=device)

    def push(self, signals: torch.Tensor, probes: torch.Tensor, plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """Take in one step; features float32 [n, F], and int32 [n], the row where a score is due, else -1."""
        places, serials, steps = plan.windows[:3]
        requests = plan.windows[3:].view(torch.float32)
        return window.push(self._state, self._owners, signals, probes, places, serials, steps, requests)

    def score(self, signals: torch.Tensor, probes: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        """Take in one step; scores float64 [n] of the rows that were probed, NaN elsewhere.

        Args:
            signals: float32 [n, 4]. probes: float32 [n, 5], all NaN where not probed.
        """
        features, due = self.push(signals, probes, plan)
        scores = torch.full((len(signals),), math.nan, dtype=torch.float64, device=signals.device)
        return forest.score(self._trees, features, rows=due, out=scores)


def start_device_policy(core: ReleaseCore, max_rows: int, logits: torch.Tensor) -> DevicePolicy | None:
    """The core's policy on the device of `logits` [2, V] (any values), with every kernel of a step compiled.

    None where there is no policy, or where it cannot run there (said once): then the host scores.
    """
    if core.artifact is None or core.followed is None:
        if core.config.record:
            _one_step(None, max_rows, logits)
        return None
    try:
        policy = DevicePolicy(core.artifact.scorer.forest(), core.followed.capacity, logits.device)
        _one_step(policy, max_rows, logits)
    except Exception:
        logger.warning("LoRazor: the policy cannot run on the device, so the host runs it", exc_info=True)
        return None
    return policy


def _one_step(policy: DevicePolicy | None, max_rows: int, logits: torch.Tensor) -> None:
    """A step of nobody's rows: Triton compiles at first use, which must not be in the middle of an answer."""
    n = len(logits)
    plan = StepPlan(range(n), [(0, 0)], np.full((6, n), -1, np.int32), max_rows, logits.device)
    tokens = torch.zeros(n, dtype=torch.long, device=logits.device)
    signals, probes = step_signals(logits, logits, tokens, plan)
    if policy is not None:
        policy.score(signals, probes, plan)
