"""Waiting requests, kept by adapter.

vLLM's loop looks at every request of its queues in every step and puts aside those that get no slot. These queues show
it only requests that may come in, so a step costs as much as there are adapters waiting, not requests.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain, count
from operator import itemgetter
from typing import Any

from vllm.v1.core.sched.request_queue import RequestQueue, SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler

from lorazor.runtime.slot_turns import Turn

# The key of requests that wait for no slot: they have no adapter, or something else keeps them out (see `key_of`).
NO_SLOT = 0


def key_of(request: Any) -> int:
    """The adapter that `request` needs a slot for. One that waits for a grammar, remote KV or more input needs none
    yet, and vLLM has to look at it to see that it is ready."""
    adapter = request.lora_request
    return adapter.lora_int_id if adapter and not Scheduler._is_blocked_waiting_status(request.status) else NO_SLOT


class AdapterQueue(RequestQueue):
    """A queue for vLLM's scheduler, of either policy. While `show` lets in some adapters only, peek, pop and bool pass
    over the requests of all others; len and iteration never do."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._by_priority = policy == SchedulingPolicy.PRIORITY
        self._heaps: dict[int, list[tuple[Any, Any]]] = {}  # (rank, request) by key; none is empty
        self._after, self._before = count(), count(-1, -1)
        self._let_in: Collection[int] | None = None
        self._fronts: list[tuple[Any, int]] | None = None  # a heap of the visible keys by first rank; None = to be made
        self._turns: list[Turn] | None = None  # None = to be made

    def show(self, let_in: Collection[int] | None) -> None:
        """From now on only requests of these adapters are seen, and those that need no slot; None = all."""
        self._let_in, self._fronts = let_in, None

    def turns(self) -> list[Turn]:
        """The adapters that wait, seen or not, the one first in turn first."""
        if self._turns is None:
            firsts = [(key, heap[0][1]) for key, heap in self._heaps.items() if key != NO_SLOT]
            turns = [Turn(r.priority if self._by_priority else 0, r.arrival_time, key, r) for key, r in firsts]
            self._turns = sorted(turns)
        return self._turns

    def _seen(self) -> list[tuple[Any, int]]:
        if self._fronts is None:
            keys = self._heaps if self._let_in is None else {NO_SLOT, *self._let_in}
            self._fronts = [(self._heaps[key][0][0], key) for key in keys if key in self._heaps]
            heapify(self._fronts)
        return self._fronts

    def _put(self, request: Any, place: int) -> None:
        rank = (request.priority, request.arrival_time, request.request_id) if self._by_priority else place
        heap, entry = self._heaps.setdefault(key_of(request), []), (rank, request)
        heappush(heap, entry)
        if heap[0] is entry:
            self._fronts = self._turns = None

    # ------------------------------------------------------------------ for vLLM
    def add_request(self, request: Any) -> None:
        """Last, or where its priority says."""
        self._put(request, next(self._after))

    def prepend_request(self, request: Any) -> None:
        """First, or where its priority says."""
        self._put(request, next(self._before))

    def prepend_requests(self, requests: RequestQueue) -> None:
        """Each before all others, so that the last one comes first, as in vLLM."""
        for request in requests:
            self.prepend_request(request)

    def peek_request(self) -> Any:
        """The first one that is seen."""
        fronts = self._seen()
        if not fronts:
            raise IndexError("peek from an empty queue")
        return self._heaps[fronts[0][1]][0][1]

    def pop_request(self) -> Any:
        """Take the first one that is seen."""
        request, fronts = self.peek_request(), self._seen()
        key = fronts[0][1]
        heap = self._heaps[key]
        heappop(heap)
        if heap:
            heapreplace(fronts, (heap[0][0], key))
        else:
            heappop(fronts)
            del self._heaps[key]
        self._turns = None
        return request

    def remove_request(self, request: Any) -> None:
        """Take out one that is there, seen or not."""
        before = len(self)
        self.remove_requests((request,))
        if len(self) == before:
            raise ValueError(f"request {request.request_id} is not in the queue")

    def remove_requests(self, requests: Iterable[Any]) -> None:
        """Take out those that are there, seen or not."""
        gone = set(requests)
        # All are looked through, as in vLLM: a status may have changed, and with it the key.
        kept = {key: [entry for entry in heap if entry[1] not in gone] for key, heap in self._heaps.items()}
        self._heaps = {key: heap for key, heap in kept.items() if heap}
        for heap in self._heaps.values():
            heapify(heap)
        self._fronts = self._turns = None

    def __bool__(self) -> bool:
        """Whether any is seen: vLLM asks this in its loop, and only there."""
        return bool(self._seen())

    def __len__(self) -> int:
        """All, seen or not."""
        return sum(map(len, self._heaps.values()))

    def __iter__(self) -> Iterator[Any]:
        """All, seen or not, in order."""
        entries = sorted(chain.from_iterable(self._heaps.values()), key=itemgetter(0))
        return (request for _, request in entries)
