"""Random traffic for a while: arrivals, aborts, loads, unloads, preemptions, failing policies; every text is checked.

LORAZOR_SOAK_SECONDS=3600 pytest tests/runtime/test_soak.py      # or `make soak`
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]  # vLLM brings it, without types
import pytest
import torch

from tests.runtime.policies import break_policy, make_policy, mend_policy, safe_from_step
from tests.runtime.tiny import (
    ON_V2,
    Ask,
    Reference,
    Tiny,
    assert_text,
    counts,
    engine,
    lora,
    prompt,
    released_at,
    run,
    scheduler,
    tokens,
    watch_preemptions,
    worker,
)

SECONDS = float(os.environ.get("LORAZOR_SOAK_SECONDS", "50"))

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(SECONDS + 1200)]

MOST_LIVE, LONGEST = 30, 55
STUCK_STEPS = 3000  # a request that is still there after as many is not coming back
GROWTH = 1.05
PROMPTS = [prompt(k, length) for k, length in enumerate((2, 11, 20, 33, 40, 60))]
LEAST = 40 if ON_V2 and not torch.cuda.is_available() else 100  # requests, however slow the machine


@pytest.fixture(scope="module")
def llm(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Three adapters on two slots, a policy that releases at step 10, and too few cache blocks."""
    policy = make_policy(Path(tmp_path_factory.mktemp("soak")) / "artifact", tiny, safe_from_step(6))
    return engine(tiny, {"policy": policy}, num_gpu_blocks_override=24, max_model_len=128, max_cpu_loras=3)


def draw(rng: random.Random) -> Ask:
    """One request: any adapter or none, by policy, forced or never, short or long; prompts come back."""
    release = rng.choice([None, None, "never", 1, 2, 5, 13, 30])
    asked = PROMPTS[rng.randrange(len(PROMPTS))]
    adapter = rng.choice(["a", "a", "b", "b", "c", None])
    return Ask(asked, adapter, release if adapter else None, tokens=rng.randint(2, LONGEST))


class Traffic:
    """What goes on in one engine, and what has come of it."""

    def __init__(self, llm: Any, tiny: Tiny, rng: random.Random) -> None:
        self.llm, self.tiny, self.rng, self.core = llm, tiny, rng, llm.llm_engine
        self.asks: dict[str, Ask] = {}
        self.live: dict[str, int] = {}
        self.did: Counter[str] = Counter()
        self.steps = 0

    def run(self, seconds: float) -> Iterator[tuple[Ask, Any]]:
        """Make steps for as long, and some more until all is done; yield each request that ended by itself."""
        end, enough = time.monotonic() + seconds, self.did["arrived"] + LEAST
        while (busy := time.monotonic() < end or self.did["arrived"] < enough) or self.core.has_unfinished_requests():
            self.steps += 1
            if busy:
                self._disturb()
            for output in self.core.step():
                if output.finished and self.live.pop(output.request_id, None) is not None:
                    self.did["ended"] += 1
                    yield self.asks.pop(output.request_id), output
            stuck = [k for k, since in self.live.items() if self.steps - since > STUCK_STEPS]
            assert not stuck, (stuck, [self.asks[k] for k in stuck])
        mend_policy(worker(self.llm))

    def _disturb(self) -> None:
        for _ in range(self.rng.choice([0, 0, 1, 4])):
            if len(self.live) < MOST_LIVE:
                self._arrive()
        for chance, act in ((0.05, self._abort), (0.03, self._unload), (0.03, self._load), (0.03, self._break)):
            if self.rng.random() < chance:
                act()

    def _arrive(self) -> None:
        self.did["arrived"] += 1
        name, ask = str(self.did["arrived"]), draw(self.rng)
        ids = {"prompt_token_ids": list(ask.prompt)}
        self.core.add_request(name, ids, ask.params(), lora_request=lora(self.tiny, ask.adapter))
        self.asks[name], self.live[name] = ask, self.steps

    def _abort(self) -> None:
        if self.live:
            name = self.rng.choice(sorted(self.live))
            self.core.abort_request([name])
            del self.live[name], self.asks[name]
            self.did["aborted"] += 1

    def _unload(self) -> None:
        self.did["unloaded"] += self.core.remove_lora(self.rng.choice([1, 2, 3]))

    def _load(self) -> None:
        self.did["loaded"] += self.core.add_lora(lora(self.tiny, self.rng.choice("abc")))

    def _break(self) -> None:
        mend_policy(worker(self.llm))
        if self.rng.random() < 0.5:
            break_policy(worker(self.llm), self.rng.choice(["exception", "nan", "shape"]))
            self.did["broken"] += 1


def check(ask: Ask, output: Any, reference: Any) -> bool:
    """The text is the reference's with the release step that the client was told; whether there was one."""
    told = released_at(output) if ask.adapter else None
    assert_text(tokens(output), reference, Ask(ask.prompt, ask.adapter, told, ask.tokens))
    if isinstance(ask.release, int):
        assert told == (ask.release if ask.tokens > ask.release else None)
    if ask.release == "never" or (ask.adapter == "c" and ask.release is None):
        assert told is None
    return told is not None


class Remembered:
    """The reference, which decodes each text once: to LONGEST tokens, of which every shorter one is a beginning."""

    def __init__(self, reference: Reference) -> None:
        self._decode = lru_cache(maxsize=None)(reference.decode)

    def decode(self, prompt: Any, adapter: str | None, release: int | None, tokens: int) -> Any:
        """As Reference.decode."""
        return self._decode(prompt, adapter, release, LONGEST)[:tokens]


def test_random_traffic(llm: Any, tiny: Tiny, reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """No request is lost, hangs or has another one's text; memory is flat; everything that could happen did."""
    preempted = watch_preemptions(llm, monkeypatch)
    traffic, remembered = Traffic(llm, tiny, random.Random(0)), Remembered(reference)
    process, used = psutil.Process(), []
    released = 0
    for share in (0.4, 0.6):  # the reference's texts are all there after the first part
        released += sum(check(ask, output, remembered) for ask, output in traffic.run(share * SECONDS))
        used.append(process.memory_info().rss)
    did = traffic.did
    print(dict(did), "preempted", len(preempted), "steps", traffic.steps, "MiB", [n >> 20 for n in used])  # noqa: T201
    assert did["arrived"] == did["ended"] + did["aborted"]
    assert not traffic.live
    assert released > did["ended"] / 10
    assert min(did[what] for what in ("aborted", "unloaded", "loaded", "broken")) > 0
    assert len(preempted) > did["arrived"] / 20
    assert used[1] < GROWTH * used[0]
    assert sum(counts(llm, "lorazor_policy_failures_total").values()) > 0


def test_nothing_is_left_behind(llm: Any, tiny: Tiny) -> None:
    """After the traffic: no request, no followed row, every block free, every slot accounted for."""
    run(llm, tiny, [Ask((1, 2), tokens=2)])
    llm.llm_engine.step()
    assert not scheduler(llm).requests
    core, manager = worker(llm).core, worker(llm).model_runner.lora_manager._adapter_manager
    assert core.status()["live_requests"] <= 1
    assert len(core.followed._free) == core.followed.capacity
    assert scheduler(llm).kv_cache_manager.usage == 0.0
    slots = [i for i in manager.lora_index_to_id if i is not None]
    assert sorted(slots) == sorted(manager._active_adapters.cache)
    assert set(slots) <= set(manager._registered_adapters.cache)
    run(llm, tiny, [Ask(prompt(k, 9), "abc"[k], tokens=3) for k in range(3)])
