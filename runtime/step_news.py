"""What the scheduler tells the workers with each step, on vLLM's SchedulerOutput."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from lorazor.runtime.slot_turns import Turn

# Adapters named, so that a few slots that come free at once find theirs read.
NAMED = 8


@dataclass(frozen=True)
class StepNews:
    """Decisions since the last step, and the adapters (LoRARequests) that wait for a slot, the next one first."""

    released: Mapping[str, int]
    given_up: Sequence[str]
    upcoming: Sequence[Any] = ()


def upcoming(turns: Iterable[Turn], admitted: Iterable[Any]) -> list[Any]:
    """The next adapters that still wait for a slot, `turns` without those of the requests that the step admitted."""
    entered = {lora.lora_int_id for request in admitted if (lora := request.lora_request)}
    loras = (turn.request.lora_request for turn in turns if turn.adapter not in entered)
    return list(islice(filter(None, loras), NAMED))
