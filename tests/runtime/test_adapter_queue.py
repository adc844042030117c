"""The queue that shows vLLM only requests that may come in: nothing lost, all in turn, and little looked at."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.request import RequestStatus

from lorazor.runtime.adapter_queue import NO_SLOT, AdapterQueue, key_of
from lorazor.runtime.slot_turns import in_turn, let_in, residents
from lorazor.runtime.step_news import NAMED, upcoming

pytestmark = pytest.mark.vllm

POLICIES = list(SchedulingPolicy)


class Asked(SimpleNamespace):
    """As much of a request as a queue looks at; `looks` counts how often."""

    looks = 0

    def __hash__(self) -> int:  # type: ignore[override]  # as a request of vLLM, by identity
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __getattribute__(self, name: str) -> Any:
        Asked.looks += name in ("lora_request", "status", "arrival_time")
        return super().__getattribute__(name)

    def __lt__(self, other: Asked) -> bool:
        return (self.priority, self.arrival_time) < (other.priority, other.arrival_time)


def asked(number: int, adapter: int = 0, priority: int = 0, blocked: bool = False) -> Asked:
    """A request that arrived at `number`."""
    return Asked(
        request_id=f"{number:04}",
        arrival_time=float(number),
        priority=priority,
        lora_request=SimpleNamespace(lora_int_id=adapter) if adapter else None,
        status=RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR if blocked else RequestStatus.WAITING,
    )


def filled(requests: Iterable[Asked], policy: SchedulingPolicy = SchedulingPolicy.FCFS) -> AdapterQueue:
    """A queue of them."""
    queue = AdapterQueue(policy)
    for request in requests:
        queue.add_request(request)
    return queue


ADAPTERS = st.integers(0, 4)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), ADAPTERS, st.integers(0, 2), st.booleans()),
        st.tuples(st.just("prepend"), ADAPTERS, st.integers(0, 2), st.booleans()),
        st.tuples(st.just("skip"), st.integers(1, 3)),
        st.tuples(st.just("pop")),
        st.tuples(st.just("promote"), st.integers(0, 9)),
        st.tuples(st.just("remove"), st.sets(st.integers(0, 9))),
        st.tuples(st.just("show"), st.none() | st.sets(st.integers(1, 4))),
    ),
    max_size=60,
)


class Beside:
    """Our queue, and a stock one of the same requests that is searched for the first one let in."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self.queue, self.stock, self.policy = AdapterQueue(policy), create_request_queue(policy), policy
        self.keys: dict[Asked, int] = {}
        self.open: set[int] | None = None
        self.made = 0

    def seen(self) -> list[Asked]:
        """The requests that are shown, in order."""
        return [r for r in self.stock if self.open is None or self.keys[r] in {NO_SLOT, *self.open}]

    def put(self, how: str, adapter: int, priority: int, blocked: bool) -> None:
        """Add or prepend a new request."""
        self.made += 1
        request = asked(self.made, adapter, priority, blocked)
        self.keys[request] = key_of(request)
        for queue in (self.queue, self.stock):
            getattr(queue, f"{how}_request")(request)

    def pop(self) -> None:
        """Both give the first one that is shown."""
        if seen := self.seen():
            assert self.queue.pop_request() is seen[0]
            self.stock.remove_request(seen[0])
        else:
            with pytest.raises(IndexError):
                self.queue.pop_request()

    def skip(self, count: int) -> None:
        """As vLLM does: take some out, and put them back in front."""
        skipped = create_request_queue(self.policy)
        for request in self.seen()[:count]:
            assert self.queue.pop_request() is request
            self.stock.remove_request(request)
            skipped.prepend_request(request)
            self.keys[request] = key_of(request)
        self.queue.prepend_requests(skipped)
        self.stock.prepend_requests(skipped)

    def promote(self, at: int) -> None:
        """What one waited for is there; it stays where it is until vLLM takes it."""
        for request in list(self.stock)[at : at + 1]:
            request.status = RequestStatus.WAITING

    def remove(self, at: set[int]) -> None:
        """Abort some, and one that is not there."""
        gone = [r for k, r in enumerate(self.stock) if k in at]
        for queue in (self.queue, self.stock):
            queue.remove_requests([*gone, asked(0)])

    def show(self, adapters: set[int] | None) -> None:
        """Let in others."""
        self.open = adapters
        self.queue.show(adapters)


@pytest.mark.parametrize("policy", POLICIES)
@given(steps=STEPS)
def test_it_is_vllms_queue_but_for_what_is_hidden(policy: SchedulingPolicy, steps: list[Any]) -> None:
    """After any additions, removals and skips the order is stock's; len and iteration count what is hidden."""
    both = Beside(policy)
    for name, *args in steps:
        if name in ("add", "prepend"):
            both.put(name, *args)
        else:
            getattr(both, name)(*args)
        seen, everything = both.seen(), list(both.stock)
        assert list(both.queue) == everything
        assert (len(both.queue), bool(both.queue)) == (len(everything), bool(seen))
        assert not seen or both.queue.peek_request() is seen[0]
        firsts = {both.keys[r]: r for r in reversed(everything) if both.keys[r] != NO_SLOT}
        assert {turn.adapter: turn.request for turn in both.queue.turns()} == firsts


def test_one_request_can_be_removed() -> None:
    """One that is not there is an error, as in stock."""
    requests = [asked(k, k % 2) for k in range(4)]
    queue = filled(requests)
    queue.remove_request(requests[2])
    assert list(queue) == [requests[0], requests[1], requests[3]]
    with pytest.raises(ValueError, match="0002"):
        queue.remove_request(requests[2])


def ids(turns: Iterable[Any]) -> list[int]:
    """The adapters."""
    return [turn.adapter for turn in turns]


def test_adapters_come_in_turn() -> None:
    """The adapter whose first request waits longest is first; resident ones and blocked requests ask for no slot."""
    skipped = filled([asked(9, 5), asked(1, 6, blocked=True)])
    waiting = filled([asked(2, 7), asked(3, 5), asked(4, 8), asked(5, 7), asked(6)])
    assert ids(in_turn(skipped.turns() + waiting.turns(), set())) == [7, 5, 8]
    assert ids(in_turn(skipped.turns() + waiting.turns(), {7})) == [5, 8]
    assert ids(in_turn([], {7})) == []


def test_under_priorities_they_come_by_priority() -> None:
    """A more urgent adapter is before one that waits longer."""
    queue = filled(
        [asked(1, 1, priority=2), asked(2, 2, priority=1), asked(3, 3, priority=1)], SchedulingPolicy.PRIORITY
    )
    turns = in_turn(queue.turns(), set())
    assert ids(turns) == [2, 3, 1]
    assert let_in([], turns, {9}, 2, late=0) == {9, 2}
    assert let_in([], turns, {9}, 2, late=2) == {9, 1}


def test_who_comes_in() -> None:
    """Everybody, if there is a slot for everybody; else the resident ones and the next; while one starves,
    only those whose first request is older."""
    turns = in_turn(filled([asked(1, 1), asked(2, 2)]).turns(), {8, 9})
    assert let_in([], turns, {8, 9}, 4, late=5) is None
    assert let_in([], turns, {8, 9}, 3, late=0) == {8, 9, 1}
    assert let_in([], turns, {8, 9}, 2, late=0) == {8, 9}
    assert let_in([], turns, {8, 9}, 2, late=2) == set()
    older, younger = filled([asked(0, 8), asked(3, 8)]).turns(), filled([asked(3, 9)]).turns()
    assert let_in([*older, *younger], turns, {8, 9}, 2, late=2) == {8}


def test_resident_adapters() -> None:
    """Those that running requests hold; once as many are found as there are slots, no further is looked at."""
    running = [asked(0, 1), asked(1), asked(2, 2), asked(3, 2), asked(4)]
    assert residents(running, 3) == residents(running, 2) == {1, 2}
    Asked.looks = 0
    assert residents(running, 1) == {2}
    assert Asked.looks == 2


def test_upcoming_adapters() -> None:
    """The next ones that the step did not admit."""
    requests = [asked(k, 1 + k) for k in range(NAMED + 2)]
    turns, adapters = in_turn(filled(requests).turns(), set()), [request.lora_request for request in requests]
    assert upcoming(turns, []) == adapters[:NAMED]
    assert upcoming(turns, [requests[0], asked(9)]) == adapters[1 : NAMED + 1]
    assert upcoming(turns, requests) == []


@given(
    adapters=st.lists(st.integers(0, 6), max_size=30),
    slots=st.integers(1, 3),
    seats=st.integers(1, 5),
    steps=st.integers(1, 4),
    patience=st.integers(0, 30),
)
def test_everybody_comes_in_in_turn(adapters: list[int], slots: int, seats: int, steps: int, patience: int) -> None:
    """One request arrives a step and runs for `steps`: all come in, an adapter's in order, adapters in their turn."""
    coming, queue, now = (
        [asked(k, adapter) for k, adapter in enumerate(adapters)],
        AdapterQueue(SchedulingPolicy.FCFS),
        0,
    )
    running: list[tuple[Asked, int]] = []
    came: list[Asked] = []
    while len(came) < len(coming):
        for request in coming[now : now + 1]:
            queue.add_request(request)
        running = [(request, end) for request, end in running if end > now]
        resident = {key_of(request) for request, _ in running} - {NO_SLOT}
        turns = in_turn(queue.turns(), resident)
        next_ones = {NO_SLOT, *resident, *ids(turns[: slots - len(resident)])}
        queue.show(let_in(queue.turns(), turns, resident, slots, now - patience))
        while queue and len(running) < seats:
            came.append(queue.pop_request())
            running.append((came[-1], now + steps))
            assert key_of(came[-1]) in next_ones
        queue.show(None)
        now += 1
        assert now <= len(coming) * (steps + 1)
    for adapter in set(adapters):
        assert [r for r in came if key_of(r) == adapter] == [r for r in coming if key_of(r) == adapter]


def looks_of_a_step(each: int) -> int:
    """How often a step looks at requests: 40 adapters, 2 of them resident, with `each` requests; 6 are admitted."""
    waiting = filled(asked(k, 1 + k % 40) for k in range(40 * each))
    Asked.looks = 0
    waiting.show(let_in(waiting.turns(), in_turn(waiting.turns(), {1, 2}), {1, 2}, 4, late=0))
    for _ in range(6):
        assert waiting
        assert key_of(waiting.peek_request()) <= 4
        waiting.pop_request()
    return Asked.looks


def test_a_step_does_not_look_at_more_requests_when_more_wait() -> None:
    """Only at those that come in and at the first of each adapter."""
    assert looks_of_a_step(3) == looks_of_a_step(300) < 100
