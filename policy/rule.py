"""The release rule as a pure state machine over request ids: who may release, and at which decision they do.

It knows neither tensors nor vLLM: the server feeds it scores as they come, and a replay over traces could feed it
the same numbers and get the same release steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lorazor.features.errors import InputError
from lorazor.features.grid import is_decision_step, release_step

Arm = Literal["policy", "control", "forced", "never", "pinned", "no_policy", "unknown_adapter", "unknown_task"]


@dataclass(frozen=True)
class Options:
    """What a request asks for in `vllm_xargs`: a release step or "never", its own threshold, its task."""

    release: int | Literal["never"] | None = None
    threshold: float | None = None
    task: str | None = None


@dataclass(frozen=True)
class Choice:
    """What may happen to one request: a forced release step, a threshold to reach, or neither (it stays)."""

    arm: Arm
    task: str | None = None
    forced: int | None = None
    threshold: float | None = None


def parse_options(extra_args: Mapping[str, Any] | None) -> Options:
    """Read the `lorazor_*` keys of a request's extra arguments; other keys are not ours.

    Raises:
        InputError: an unknown `lorazor_*` key, or a value that breaks its key's rule.
    """
    ours = {k: v for k, v in (extra_args or {}).items() if k.startswith("lorazor_")}
    unknown = sorted(ours.keys() - {"lorazor_release", "lorazor_threshold", "lorazor_task"})
    if unknown:
        raise InputError(f"{unknown[0]} is not an option: use lorazor_release, lorazor_threshold or lorazor_task")
    release, threshold = ours.get("lorazor_release"), ours.get("lorazor_threshold")
    task = ours.get("lorazor_task")
    if task is not None and not isinstance(task, str):
        raise InputError(f"lorazor_task must be a string, got {task!r}")
    return Options(_release(release), _threshold(threshold), task)


def _release(value: Any) -> int | Literal["never"] | None:
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if value is None or value == "never":
        return value  # type: ignore[no-any-return]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f'lorazor_release must be "never" or a release step of at least 1, got {value!r}')
    return value


def _threshold(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise InputError(f"lorazor_threshold must be a number in [0, 1], got {value!r}")
    return float(value)


def in_fraction(key: str, fraction: float) -> bool:
    """Whether this key, such as a request's id, is among about that fraction of all, by its sha256 (repeatable)."""
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def choose(
    options: Options,
    request_id: str,
    *,
    pinned: bool,
    has_policy: bool,
    knows_adapter: bool,
    adapter_task: str | None,
    thresholds: Mapping[str, float | None],
    release_fraction: float,
) -> Choice:
    """Settle one request at admission.

    A pinned adapter always stays. What the request asks for comes next; `release_fraction` is the operator's limit on
    what the policy may do, so it holds for a request's own threshold too, but not for a forced step.

    Args:
        knows_adapter: whether the adapter's weights are among those that the policy was trained on.
        adapter_task: the task that policy.json gives the adapter, if any.
        thresholds: the policy's threshold per task; None = never.
    """
    task = options.task or adapter_task
    if pinned:
        return Choice("pinned", task)
    if options.release == "never":
        return Choice("never", task)
    if options.release is not None:
        return Choice("forced", task, forced=options.release)
    if not has_policy:
        return Choice("no_policy", task)
    if not knows_adapter:
        return Choice("unknown_adapter", task)
    if task is None or task not in thresholds:
        return Choice("unknown_task", task)
    if not in_fraction(request_id, release_fraction):
        return Choice("control", task)
    return Choice("policy", task, threshold=thresholds[task] if options.threshold is None else options.threshold)


class ReleaseRule:
    """Follows requests from admission to their end; a release is for good.

    Example (g = 4): admit("a", Choice("policy", threshold=0.9)); decide("a", 0, 0.1) is None; decide("a", 1, 0.95)
    is 3; from then on released("a") is 3 and wants_score("a", 4) is False.
    """

    def __init__(self, probe_interval: int | None) -> None:
        self._probe_interval = probe_interval
        self._choices: dict[str, Choice] = {}
        self._released: dict[str, int] = {}

    def admit(self, request_id: str, choice: Choice) -> None:
        """Start to follow a request."""
        self._choices[request_id] = choice

    def wants_score(self, request_id: str, c: int) -> bool:
        """Whether a score at decision step `c` (0 = admission) could release this request."""
        choice = self._choices.get(request_id)
        if choice is None or choice.threshold is None or request_id in self._released:
            return False
        return c == 0 or (self._probe_interval is not None and is_decision_step(c, self._probe_interval))

    def decide(self, request_id: str, c: int, score: float | None) -> int | None:
        """The release step that this decision gives, or None if the request keeps its adapter.

        `score` None means that there is none (the policy failed, or the request has no threshold).
        """
        choice = self._choices.get(request_id)
        if choice is None or request_id in self._released:
            return None
        step = choice.forced
        if self.wants_score(request_id, c) and score is not None and score >= (choice.threshold or 0.0):
            step = release_step(c)
        if step is not None:
            self.release(request_id, step)
        return step

    def release(self, request_id: str, step: int) -> None:
        """Release a request at this step; for one that another rule decided about."""
        self._released[request_id] = step

    def released(self, request_id: str) -> int | None:
        """The release step of a request, None while it keeps its adapter."""
        return self._released.get(request_id)

    def forget(self, request_id: str) -> None:
        """Drop a finished request."""
        self._choices.pop(request_id, None)
        self._released.pop(request_id, None)
