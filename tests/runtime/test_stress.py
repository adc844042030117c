"""Random traffic against the reference: whatever is admitted, preempted, aborted or released, every text is right."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.policies import make_policy, safe_from_step
from tests.runtime.tiny import Ask, Reference, Tiny, assert_text, engine, lora, prompt, released_at, scheduler, worker

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

REQUESTS, ABORTED = 150, 0.1


@pytest.fixture(scope="module")
def llm(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Three adapters on two slots, a policy that releases at step 10, and too few cache blocks."""
    policy = make_policy(Path(tmp_path_factory.mktemp("stress")) / "artifact", tiny, safe_from_step(6))
    return engine(tiny, {"policy": policy}, num_gpu_blocks_override=24, max_model_len=128)


def draw(rng: random.Random, k: int) -> Ask:
    """One request: any adapter or none, by policy, forced or never, short or long; some share their prompt."""
    release = rng.choice([None, None, "never", 1, 2, 5, 13, 30])
    shared = prompt(rng.randrange(8), rng.choice([20, 40]))
    own = prompt(1000 + k, rng.randint(2, 60))
    adapter = rng.choice(["a", "a", "b", "b", "c", None])
    return Ask(rng.choice([shared, own]), adapter, release if adapter else None, tokens=rng.randint(2, 55))


def drive(llm: Any, tiny: Tiny, asks: list[Ask], rng: random.Random) -> dict[str, Any]:
    """Feed requests at random moments, abort some, and return the outputs of those that ended by themselves."""
    core, waiting, running, done = llm.llm_engine, dict(enumerate(asks)), set[str](), dict[str, Any]()
    while waiting or core.has_unfinished_requests():
        for _ in range(rng.choice([0, 0, 1, 4])):
            if waiting:
                k, ask = waiting.popitem()
                ids = {"prompt_token_ids": list(ask.prompt)}
                core.add_request(str(k), ids, ask.params(), lora_request=lora(tiny, ask.adapter))
                running.add(str(k))
        if running and rng.random() < ABORTED:
            gone = rng.choice(sorted(running))
            core.abort_request([gone])
            running.discard(gone)
        for output in core.step():
            if output.finished:
                done[output.request_id] = output
                running.discard(output.request_id)
    return done


@pytest.mark.parametrize("seed", [0, 1])
def test_random_traffic(llm: Any, tiny: Tiny, reference: Reference, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Each text is that of the reference with the release step that the client was told."""
    rng = random.Random(seed)
    preempted: list[str] = []
    stock = scheduler(llm)._preempt_request

    def watch(request: Any, *args: Any, **kwargs: Any) -> None:
        preempted.append(request.request_id)
        stock(request, *args, **kwargs)

    monkeypatch.setattr(scheduler(llm), "_preempt_request", watch)
    asks = [draw(rng, k + 1000 * seed) for k in range(REQUESTS)]
    done = drive(llm, tiny, asks, rng)
    assert len(done) > REQUESTS / 2
    released = 0
    for k, output in done.items():
        ask = asks[int(k)]
        told = released_at(output) if ask.adapter else None
        assert_text(output.outputs[0].token_ids, reference, Ask(ask.prompt, ask.adapter, told, ask.tokens))
        if isinstance(ask.release, int):
            assert told == (ask.release if ask.tokens > ask.release else None)
        if ask.release == "never" or (ask.adapter == "c" and not isinstance(ask.release, int)):
            assert told is None
        released += told is not None
    assert released > REQUESTS / 5
    assert len(preempted) > REQUESTS / 10


def test_nothing_is_left_behind(llm: Any, tiny: Tiny) -> None:
    """After the traffic: no request, no followed row, every block free."""
    llm.generate([{"prompt_token_ids": [1, 2]}], Ask((), tokens=2).params(), use_tqdm=False)
    llm.llm_engine.step()
    assert not scheduler(llm).requests
    assert worker(llm).core.status()["live_requests"] <= 1
    followed = worker(llm).core.followed
    assert len(followed._free) == 4 * 16
    assert scheduler(llm).kv_cache_manager.usage == 0.0
