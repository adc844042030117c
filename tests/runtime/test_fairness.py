"""Every waiting adapter gets a slot within a bounded time, whatever the traffic; and which adapters are next."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from lorazor.runtime.step_news import LOOKED_AT, upcoming
from tests.runtime.tiny import OVERLAP, Ask, Tiny, engine, lora, scheduler

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
    for k, (name, tokens) in enumerate((("z0", 20), ("z1", 6), ("z2", 4), ("z1", 6), ("z3", 4))):
        ids = {"prompt_token_ids": [3, 4, k]}
        params = Ask((), tokens=tokens).params()
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


def ask_of(lora_id: int | None) -> Any:
    return SimpleNamespace(lora_request=lora_id and SimpleNamespace(lora_int_id=lora_id))


def ids_of(found: list[Any]) -> list[int]:
    return [lora.lora_int_id for lora in found]


def test_upcoming_adapters() -> None:
    """The first two that wait and are not resident, over both queues; of a long queue only the front is looked at."""
    running = [ask_of(1), ask_of(None), ask_of(2)]
    assert ids_of(upcoming(([ask_of(3), ask_of(1)], [ask_of(None), ask_of(3), ask_of(5), ask_of(6)]), running)) == [
        3,
        5,
    ]
    assert upcoming(([ask_of(2)], []), running) == []
    assert upcoming(([ask_of(1)] * LOOKED_AT, [ask_of(9)]), running) == []
