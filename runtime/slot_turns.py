"""Whose turn it is for an adapter slot: the adapter's whose first request has waited longest."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple


class Turn(NamedTuple):
    """A waiting adapter: where its first request stands among others', since when that waits, its id, the request."""

    priority: int
    since: float
    adapter: int
    request: Any


def residents(running: Sequence[Any], slots: int) -> set[int]:
    """The adapters that running requests hold; there are no more than slots."""
    found: set[int] = set()
    for request in reversed(running):  # the last ones are the least likely to be released
        if adapter := request.lora_request:
            found.add(adapter.lora_int_id)
            if len(found) == slots:
                break
    return found


def in_turn(turns: Iterable[Turn], resident: Collection[int]) -> list[Turn]:
    """Those of the adapters that are not resident, the next one for a slot first, each adapter once."""
    first: dict[int, Turn] = {}
    for turn in sorted(turns):
        if turn.adapter not in resident:
            first.setdefault(turn.adapter, turn)
    return list(first.values())


def let_in(asking: Iterable[Turn], turns: list[Turn], resident: set[int], slots: int, late: float) -> set[int] | None:
    """The adapters of which requests may come in, None = any: the resident ones and the next for free slots.

    One that has waited since before `late` is the next. While no slot is free for it, no younger request of resident
    ones may, so that they drain. `asking` are all waiting adapters, `turns` those of them in turn for a slot.
    """
    free = slots - len(resident)
    if len(turns) <= free:
        return None
    in_order = turns[0].priority == turns[-1].priority
    oldest = turns[0] if in_order else min(turns, key=attrgetter("since"))
    if oldest.since < late:
        if free <= 0:
            return {turn.adapter for turn in asking if turn.adapter in resident and turn.since < oldest.since}
        turns = [oldest, *(turn for turn in turns if turn is not oldest)]
    return resident | {turn.adapter for turn in turns[:free]}
