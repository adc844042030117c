"""What the scheduler tells the workers with each step, on vLLM's SchedulerOutput."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

# Waiting requests that are looked at; most of a long queue may wait for a seat, not for an adapter slot.
LOOKED_AT = 64
# Adapters named: the next one to get a slot, and one more.
NAMED = 2


@dataclass(frozen=True)
class StepNews:
    """Decisions since the last step, and the adapters (LoRARequests) that wait for a slot, the next one first."""

    released: Mapping[str, int]
    given_up: Sequence[str]
    upcoming: Sequence[Any] = ()


def upcoming(queues: Iterable[Iterable[Any]], running: Iterable[Any]) -> list[Any]:
    """The adapters that the next of the waiting requests need and no running one holds."""
    resident = {r.lora_request.lora_int_id for r in running if r.lora_request}
    waiting = (r.lora_request for r in islice(chain.from_iterable(queues), LOOKED_AT))
    found = {lora.lora_int_id: lora for lora in waiting if lora and lora.lora_int_id not in resident}
    return list(found.values())[:NAMED]
