"""Probes through shadow rows, on model runner V2: exact wherever the probed position lies, and seen by nobody else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lorazor.features.signals import probe_signals
from lorazor.runtime.counters import FAILURES
from tests.runtime.policies import PROBE_INTERVAL, make_policy, safe_from_step
from tests.runtime.tiny import (
    ON_V2,
    Ask,
    Reference,
    Tiny,
    assert_text,
    counts,
    engine,
    prompt,
    released_at,
    run,
    scheduler,
    tokens,
    watch_preemptions,
    worker,
)

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(not ON_V2, reason="shadow rows are model runner V2's")]

BLOCK, REQUESTS, BLOCKS = 16, 8, 40


@pytest.fixture(scope="module")
def policy(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> str:
    """One that releases at no step that these tests reach."""
    return make_policy(Path(tmp_path_factory.mktemp("shadow")) / "artifact", tiny, safe_from_step(60))


@pytest.fixture(scope="module")
def llm(tiny: Tiny, policy: str) -> Any:
    """Eight requests at once and 64 tokens a step, with the prefix cache."""
    options = {"max_num_seqs": REQUESTS, "num_gpu_blocks_override": BLOCKS, "enable_prefix_caching": True}
    return engine(tiny, {"policy": policy}, **options)


class Seen:
    """What a runner's probes gave, by request and step, and how many came of a pass over the whole batch."""

    def __init__(self, runner: Any) -> None:
        self.probes: dict[tuple[str, int], torch.Tensor] = {}
        self.mixed = self.whole = 0
        observe, base_logits, drop = runner.core.observe, runner._base_logits, runner._drop_shadows

        def watch(sampled: Any) -> None:
            for request_id, step, probe in zip(sampled.ids, sampled.steps, sampled.probes, strict=True):
                if not probe.isnan().all():
                    self.probes[request_id, step] = probe
            observe(sampled)

        def count(run: Any) -> Any:
            self.whole += 1
            return base_logits(run)

        def look(batch: Any) -> bool:
            longest = int(batch.num_scheduled_tokens.max())
            dropped = bool(drop(batch))
            self.mixed += dropped and longest > 1
            return dropped

        runner.core.observe, runner._base_logits, runner._drop_shadows = watch, count, look

    def of(self, outputs: Sequence[Any]) -> list[dict[int, torch.Tensor]]:
        """The probes of each output's request by step."""
        return [
            {step: probe for (i, step), probe in self.probes.items() if i.split("-")[0] == output.request_id}
            for output in outputs
        ]


@pytest.fixture
def seen(llm: Any) -> Iterator[Seen]:
    """What this test's probes gave; the host scores, or only scores would come home."""
    runner = worker(llm).model_runner
    policy, runner.device_policy = runner.device_policy, None
    yield Seen(runner)
    runner.device_policy = policy
    del runner.core.observe, runner._base_logits, runner._drop_shadows


def wanted(reference: Reference, ask: Ask) -> dict[int, torch.Tensor]:
    """The probes' signals of a request that is never released, from plain transformers."""
    assert ask.adapter is not None
    own = reference.decode(ask.prompt, ask.adapter, None, ask.tokens)
    base = reference.base_logits_beside(ask.prompt, ask.adapter, ask.tokens)
    return {
        c: probe_signals(own[c][1][None], base[c - 1][None], torch.tensor([own[c][0]]))[0]
        for c in range(1, ask.tokens)
        if c == 1 or c % PROBE_INTERVAL == 0
    }


def assert_exact(got: dict[int, torch.Tensor], reference: Reference, ask: Ask) -> None:
    """Every decision step was probed, and the signals are the reference's."""
    want = wanted(reference, ask)
    assert set(got) == set(want)
    for step, probe in got.items():
        torch.testing.assert_close(probe, want[step], rtol=1e-3, atol=1e-4, msg=f"step {step}")


def test_exact_at_every_place_of_a_block(llm: Any, tiny: Tiny, reference: Reference, seen: Seen) -> None:
    """Positions that start, end and lie within a block, beside rows that are not probed; texts are as ever.

    The first probe of a prompt of P tokens is at position P.
    """
    asks = [Ask(prompt(k, 13 + k), "ab"[k % 2], tokens=20) for k in range(6)] + [Ask(prompt(9, 12), tokens=20)]
    assert {len(ask.prompt) % BLOCK for ask in asks} >= {0, BLOCK - 1, 1}
    outputs = run(llm, tiny, asks)
    for ask, output, probes in zip(asks, outputs, seen.of(outputs), strict=True):
        assert_text(tokens(output), reference, ask)
        if ask.adapter:
            assert_exact(probes, reference, ask)
    assert seen.whole == 0
    assert counts(llm, FAILURES) == {}


def test_same_as_a_pass_over_the_whole_batch(llm: Any, tiny: Tiny, seen: Seen) -> None:
    """The two ways to probe give the same signals."""
    asks = [Ask(prompt(30 + k, 7 + 4 * k), "ab"[k % 2]) for k in range(4)]
    by_shadows = seen.of(run(llm, tiny, asks))
    assert seen.whole == 0
    runner = worker(llm).model_runner
    scratch, runner._scratch = runner._scratch, None
    try:
        by_passes = seen.of(run(llm, tiny, asks))
    finally:
        runner._scratch = scratch
    assert seen.whole > 0
    for one, other in zip(by_shadows, by_passes, strict=True):
        assert len(one) == 6
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_steps_with_a_prefill(llm: Any, tiny: Tiny, reference: Reference, seen: Seen) -> None:
    """Rows are probed beside prompts that take several steps."""
    asks = [Ask(prompt(1, 10), "a"), Ask(prompt(2, 150), "b"), Ask(prompt(3, 30), "a"), Ask(prompt(4, 130), None)]
    outputs = run(llm, tiny, asks)
    for ask, output, probes in zip(asks, outputs, seen.of(outputs), strict=True):
        assert_text(tokens(output), reference, ask)
        if ask.adapter:
            assert_exact(probes, reference, ask)
    assert seen.mixed > 0
    assert seen.whole == 0


def test_shared_blocks_stay_as_they_are(llm: Any, tiny: Tiny, reference: Reference, seen: Seen) -> None:
    """Requests on cached blocks, with the probe's position first in a block: text and probes as without a cache."""
    ask = Ask(prompt(5, 3 * BLOCK), "a")
    for _ in range(2):
        outputs = run(llm, tiny, [ask, Ask(ask.prompt, "b"), ask])
        for output, probes, adapter in zip(outputs, seen.of(outputs), "aba", strict=True):
            assert_text(tokens(output), reference, Ask(ask.prompt, adapter))
            assert_exact(probes, reference, Ask(ask.prompt, adapter))
    assert outputs[0].num_cached_tokens >= 2 * BLOCK
    assert seen.whole == 0


def test_preempted_requests(llm: Any, tiny: Tiny, reference: Reference, seen: Seen, monkeypatch: Any) -> None:
    """Too few blocks: what is probed after a resumption is right as well."""
    preempted = watch_preemptions(llm, monkeypatch)
    asks = [Ask(prompt(60 + k, 60 + k), "ab"[k % 2], tokens=60) for k in range(8)]
    outputs = run(llm, tiny, asks)
    assert len(preempted) >= 2
    for ask, output, probes in zip(asks, outputs, seen.of(outputs), strict=True):
        assert_text(tokens(output), reference, ask)
        want = wanted(reference, ask)
        for step, probe in probes.items():
            torch.testing.assert_close(probe, want[step], rtol=1e-3, atol=1e-4)


def test_more_rows_than_room(llm: Any, tiny: Tiny, reference: Reference, seen: Seen, monkeypatch: Any) -> None:
    """A step in which more rows are due than there are scratch blocks is probed over the whole batch."""
    monkeypatch.setattr(worker(llm).model_runner._scratch, "count", 2)
    asks = [Ask(prompt(70 + k, 9), "ab"[k % 2]) for k in range(4)]
    outputs = run(llm, tiny, asks)
    for ask, output, probes in zip(asks, outputs, seen.of(outputs), strict=True):
        assert_text(tokens(output), reference, ask)
        assert_exact(probes, reference, ask)
    assert seen.whole > 0


def test_a_failing_pass_over_the_whole_batch(llm: Any, tiny: Tiny, reference: Reference, monkeypatch: Any) -> None:
    """As a failing shadow (test_policy.py): probing is switched off, and no text changes."""
    runner = worker(llm).model_runner

    def fail(run: Any) -> None:
        raise RuntimeError("no probe today")

    monkeypatch.setattr(runner, "_scratch", None)
    monkeypatch.setattr(runner, "_base_logits", fail)
    monkeypatch.setattr(runner, "_probes_work", True)
    asks = [Ask(prompt(75 + k, 9), "ab"[k]) for k in range(2)]
    outputs = run(llm, tiny, asks)
    assert not runner._probes_work
    for ask, output in zip(asks, outputs, strict=True):
        assert_text(tokens(output), reference, ask)


def log_probabilities(output: Any) -> list[dict[int, float]]:
    """Token -> log-probability, of the prompt's tokens from the second on and of the output's."""
    steps = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    return [{token: found.logprob for token, found in step.items()} for step in steps]


def test_log_probabilities(llm: Any, tiny: Tiny, seen: Seen) -> None:
    """Of prompts and of outputs: the same as without a neighbour that is probed."""
    sampling = json.dumps({"prompt_logprobs": 2, "logprobs": 3})
    ask = Ask(prompt(80, 90), None, tokens=12, sampling=sampling)
    (alone,) = run(llm, tiny, [ask])
    assert not seen.probes
    beside = run(llm, tiny, [Ask(prompt(81, 11), "a"), Ask(prompt(82, 12), "b", sampling='{"logprobs": 1}'), ask])[2]
    assert len(seen.probes) == 12
    assert seen.whole > 0
    assert tokens(beside) == tokens(alone)
    for one, other in zip(beside.prompt_logprobs[1:], alone.prompt_logprobs[1:], strict=True):
        assert {t: x.logprob for t, x in one.items()} == pytest.approx(
            {t: x.logprob for t, x in other.items()}, abs=1e-4
        )
    for one, other in zip(beside.outputs[0].logprobs, alone.outputs[0].logprobs, strict=True):
        assert {t: x.logprob for t, x in one.items()} == pytest.approx(
            {t: x.logprob for t, x in other.items()}, abs=1e-4
        )


def test_structured_output(llm: Any, tiny: Tiny, reference: Reference, seen: Seen) -> None:
    """A grammar is held to on a probed row, and its rows are not mixed up with those before them."""
    grammar = '{"structured_outputs": {"regex": "[a-f]{10}[0-9]{10}"}}'
    asks = [Ask(prompt(95, 14), "a"), Ask(prompt(96, 15), "b", tokens=20, sampling=grammar), Ask(prompt(97, 70))]
    outputs = run(llm, tiny, asks)
    assert re.fullmatch("[a-f]{10}[0-9]{10}", outputs[1].outputs[0].text)
    assert [len(probes) for probes in seen.of(outputs)] == [6, 5, 0]
    for k in (0, 2):
        assert_text(tokens(outputs[k]), reference, asks[k])
    assert seen.whole == 0


def test_what_the_user_set_holds(llm: Any) -> None:
    """The scheduler admits what it was told to, and its blocks are as many as asked for; the worker has room."""
    runner, blocks = worker(llm).model_runner, scheduler(llm).kv_cache_config.num_blocks
    assert scheduler(llm).max_num_running_reqs == REQUESTS
    assert scheduler(llm).max_num_scheduled_tokens == 64
    assert (runner.max_num_reqs, runner.max_num_tokens) == (2 * REQUESTS, 64 + REQUESTS)
    assert blocks == BLOCKS == worker(llm).cache_config.num_gpu_blocks
    assert runner.kv_cache_config.num_blocks == BLOCKS + REQUESTS


def test_released_rows_get_no_shadow(llm: Any, tiny: Tiny, reference: Reference, seen: Seen) -> None:
    """A forced release ends the probing of its request and of no other."""
    asks = [Ask(prompt(90, 14), "a", 6), Ask(prompt(91, 15), "a")]
    outputs = run(llm, tiny, asks)
    first, second = seen.of(outputs)
    assert released_at(outputs[0]) == 6
    assert first == {}
    assert_exact(second, reference, asks[1])
    for ask, output in zip(asks, outputs, strict=True):
        assert_text(tokens(output), reference, ask)
