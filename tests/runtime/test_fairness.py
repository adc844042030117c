"""Every waiting adapter gets a slot within a bounded time, whatever the traffic."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from lorazor.runtime.adapter_queue import AdapterQueue
from tests.runtime.tiny import (
    OVERLAP,
    Ask,
    Reference,
    Tiny,
    assert_text,
    engine,
    lora,
    prompt,
    run,
    scheduler,
    tokens,
)

pytestmark = pytest.mark.vllm

ADAPTERS, SLOTS, TOKENS, LIMIT = 8, 2, 8, 12


@pytest.fixture(scope="module")
def many(tiny: Tiny) -> Tiny:
    """Eight adapters, on the files of three."""
    folders = list(tiny.adapters.values())
    return Tiny(tiny.base, {f"z{k}": folders[k % len(folders)] for k in range(ADAPTERS)})


@pytest.fixture(scope="module")
def llm(many: Tiny) -> Any:
    """Two slots."""
    return engine(many, {}, max_loras=SLOTS, max_cpu_loras=ADAPTERS)


def waits(llm: Any, many: Tiny, clock: Any, seed: int, steps: int, share: float) -> list[int]:
    """Zipf traffic, `share` requests a step, the rest to the end: the steps that each request waited for its first
    token."""
    core, draw = llm.llm_engine, Random(seed)
    names = list(many.adapters)
    weights = [1 / (1 + k) ** 1.2 for k in range(ADAPTERS)]
    params = Ask((), tokens=TOKENS).params()
    arrived: dict[str, int] = {}
    waited: dict[str, int] = {}
    while clock.now < steps or core.has_unfinished_requests():
        if clock.now < steps and draw.random() < share:
            (name,) = draw.choices(names, weights)
            ids = {"prompt_token_ids": [1, 2, clock.now % 100]}
            arrived[f"{seed}-{clock.now}"] = clock.now
            core.add_request(
                f"{seed}-{clock.now}", ids, params, arrival_time=float(clock.now), lora_request=lora(many, name)
            )
        for output in core.step():
            waited.setdefault(output.request_id, clock.now - arrived[output.request_id])
        clock.now += 1
    assert waited.keys() == arrived.keys()
    return list(waited.values())


@pytest.mark.parametrize("seed", range(3))
def test_no_adapter_waits_longer_than_the_others_take(
    llm: Any, many: Tiny, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """A request overtaken until the limit then waits for a slot, at worst behind one turn of every other adapter."""
    clock = SimpleNamespace(now=0)
    monkeypatch.setattr("lorazor.runtime.scheduler.time", SimpleNamespace(time=lambda: float(clock.now)))
    monkeypatch.setattr("lorazor.runtime.scheduler.STARVATION_SECONDS", float(LIMIT))
    turn = TOKENS + 1 + 2 * OVERLAP
    longest = max(waits(llm, many, clock, seed, 100, 1.0))
    assert LIMIT < longest <= LIMIT + ADAPTERS * turn


def test_a_starving_adapter_gets_the_next_free_slot(llm: Any, many: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the adapters that wait, the one over the limit comes in when the first resident one has drained."""
    clock = SimpleNamespace(now=0)
    monkeypatch.setattr("lorazor.runtime.scheduler.time", SimpleNamespace(time=lambda: float(clock.now)))
    monkeypatch.setattr("lorazor.runtime.scheduler.STARVATION_SECONDS", 0.0)
    core, first = llm.llm_engine, []
    for k, (name, length) in enumerate((("z0", 20), ("z1", 6), ("z2", 4), ("z1", 6), ("z3", 4))):
        ids = {"prompt_token_ids": [3, 4, k]}
        params = Ask((), tokens=length).params()
        core.add_request(str(k), ids, params, arrival_time=float(k), lora_request=lora(many, name))
        clock.now = k + 1
        for output in core.step():
            first += [output.request_id] if output.request_id not in first else []
    while core.has_unfinished_requests():
        clock.now += 1
        for output in core.step():
            first += [output.request_id] if output.request_id not in first else []
    assert first == ["0", "1", "2", "3", "4"]
    assert not scheduler(llm).requests


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The waiting requests that vLLM's loop looks at."""
    looks: list[Any] = []
    stock = AdapterQueue.peek_request

    def watch(queue: AdapterQueue) -> Any:
        looks.append(stock(queue))
        return looks[-1]

    monkeypatch.setattr(AdapterQueue, "peek_request", watch)
    return looks


def asks_of(many: Tiny, sampling: str = "{}") -> list[Ask]:
    """Three short requests of each adapter, released or not, between some without one."""
    asks = []
    for k, name in enumerate([*many.adapters, None] * 3):
        release = [None, 1, "never", 3, None][k % 5] if name else None
        asks.append(Ask(prompt(k, 6 + k % 5), name, release, 5, sampling))
    return asks


def assert_texts(many: Tiny, reference: Reference, asks: list[Ask], outputs: list[Any]) -> None:
    """Each is the reference's text with the adapter of the same files."""
    files = dict(zip(many.adapters, "abc" * ADAPTERS, strict=False))
    for ask, output in zip(asks, outputs, strict=True):
        of_files = replace(ask, adapter=files[ask.adapter] if ask.adapter else None)
        assert_text(tokens(output), reference, of_files)


@pytest.mark.parametrize("limit", [0.0, 1e9])
def test_many_adapters_share_the_slots(
    llm: Any, many: Tiny, reference: Reference, looked_at: list[Any], monkeypatch: pytest.MonkeyPatch, limit: float
) -> None:
    """Every text is right, whether adapters starve or not; vLLM looks at each request when it comes in, and hardly
    ever before."""
    monkeypatch.setattr("lorazor.runtime.scheduler.STARVATION_SECONDS", limit)
    asks = asks_of(many)
    assert_texts(many, reference, asks, run(llm, many, asks))
    assert len(asks) <= len(looked_at) // 2 <= 1.2 * len(asks)  # peek and pop


def test_priorities(many: Tiny, reference: Reference) -> None:
    """Under vLLM's other policy every text is right, and the most urgent adapter comes in first."""
    llm = engine(many, {}, max_loras=SLOTS, max_cpu_loras=ADAPTERS, scheduling_policy="priority", max_num_seqs=2)
    asks = asks_of(many)
    first: list[int] = []
    for k, ask in enumerate(asks):
        ids = {"prompt_token_ids": list(ask.prompt)}
        llm.llm_engine.add_request(
            str(k), ids, ask.params(), lora_request=lora(many, ask.adapter), priority=int(ask.adapter != "z5")
        )
    outputs: dict[str, Any] = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            first += [int(output.request_id)] if output.request_id not in outputs else []
            outputs[output.request_id] = output
    assert {asks[k].adapter for k in first[:3]} == {"z5"}
    assert_texts(many, reference, asks, [outputs[str(k)] for k in range(len(asks))])


def test_requests_that_wait_for_a_grammar_get_no_slot_before_others(
    llm: Any, many: Tiny, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests with grammars of resident adapters do not overtake an adapter that starves; all of them end."""
    monkeypatch.setattr("lorazor.runtime.scheduler.STARVATION_SECONDS", 0.0)
    asks = asks_of(many, json.dumps({"structured_outputs": {"regex": "[a-z]{5}"}}))
    starved: list[Any] = []
    stock = scheduler(llm)._try_promote_blocked_waiting_request

    def watch(request: Any) -> bool:
        ready: bool = stock(request)
        starved.extend([request] if not ready and request.status == RequestStatus.WAITING else [])
        return ready

    monkeypatch.setattr(scheduler(llm), "_try_promote_blocked_waiting_request", watch)
    outputs = run(llm, many, asks)
    assert all(len(tokens(output)) == 5 for output in outputs)
    assert starved
    assert not scheduler(llm).requests
