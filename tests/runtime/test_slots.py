"""Adapter slots, preemption and starvation, on an engine with one slot and too few cache blocks."""

from __future__ import annotations

from typing import Any

import pytest

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
    watch_preemptions,
)

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def llm(tiny: Tiny) -> Any:
    """One adapter slot; 14 blocks of 16 tokens."""
    return engine(tiny, {}, max_loras=1, num_gpu_blocks_override=14, max_model_len=128)


def first_tokens(llm: Any, tiny: Tiny, asks: list[Ask]) -> tuple[dict[str, int], dict[str, list[int]]]:
    """Step by hand: the engine step of each request's first token, and all final tokens."""
    core = llm.llm_engine
    for k, ask in enumerate(asks):
        core.add_request(
            str(k), {"prompt_token_ids": list(ask.prompt)}, ask.params(), lora_request=lora(tiny, ask.adapter)
        )
    started: dict[str, int] = {}
    final: dict[str, list[int]] = {}
    for step in range(400):
        if not core.has_unfinished_requests():
            break
        for output in core.step():
            started.setdefault(output.request_id, step)
            final[output.request_id] = tokens(output)
    return started, final


def test_a_slot_is_free_once_its_last_active_row_is_released(llm: Any, tiny: Tiny, reference: Reference) -> None:
    """With one slot, the waiting adapter starts right after the release, not after the request's end."""
    asks = [Ask(prompt(1, 10), "a", 3, tokens=40), Ask(prompt(2, 10), "b", tokens=10)]
    started, final = first_tokens(llm, tiny, asks)
    later = OVERLAP  # the prompt's token is read, and the slot is free, a step later
    assert started == {"0": later, "1": 3 + later}
    for k, ask in enumerate(asks):
        assert_text(final[str(k)], reference, ask)


def test_an_unreleased_request_keeps_its_slot(llm: Any, tiny: Tiny, reference: Reference) -> None:
    """Without a release the waiting adapter starts when the request ends."""
    asks = [Ask(prompt(1, 10), "a", "never", tokens=40), Ask(prompt(2, 10), "b", tokens=10)]
    started, final = first_tokens(llm, tiny, asks)
    assert started["1"] >= 40
    assert_text(final["1"], reference, asks[1])


def test_preempted_requests_resume_by_the_boundary_rule(
    llm: Any, tiny: Tiny, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too few blocks: requests are preempted before and after their release, and end with the unpreempted text."""
    asks = [Ask(prompt(30 + k, 20), "a", r, tokens=60) for k, r in enumerate((2, 7, 30, 45, None))]
    preempted = watch_preemptions(llm, monkeypatch)
    outputs = run(llm, tiny, asks)
    assert len(preempted) >= 3
    assert any(boundary is not None and computed >= boundary for computed, boundary in preempted)
    for ask, output in zip(asks, outputs, strict=True):
        assert_text(tokens(output), reference, ask)


def test_two_adapters_share_one_slot_through_preemptions(llm: Any, tiny: Tiny, reference: Reference) -> None:
    """Released requests that are preempted need their adapter again, and wait for the slot: every text is right."""
    releases = (1, 2, 5, 9, 20, None)
    asks = [Ask(prompt(60 + k, 18), "ab"[k % 2], r, tokens=50) for k, r in enumerate(releases)]
    for ask, output in zip(asks, run(llm, tiny, asks), strict=True):
        assert_text(tokens(output), reference, ask)


def steps_until_served(llm: Any, tiny: Tiny, limit: int) -> int | None:
    """Feed the resident adapter without pause; the step at which the other adapter's request ends."""
    core = llm.llm_engine
    params = Ask((), tokens=8).params()
    for step in range(limit):
        if step % 4 == 0:
            ids = {"prompt_token_ids": [1, 2, step % 100]}
            core.add_request(f"a{step}-{limit}", ids, params, lora_request=lora(tiny, "a"))
        if step == 2:
            core.add_request(
                "b", {"prompt_token_ids": [5, 6]}, Ask((), tokens=3).params(), lora_request=lora(tiny, "b")
            )
        if "b" in {o.request_id for o in core.step() if o.finished}:
            return step
    return None


def test_no_adapter_starves(llm: Any, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """While requests of the resident adapter keep coming, another adapter waits for ever in stock, but not here."""
    for limit, served in ((1e9, False), (0.05, True)):
        monkeypatch.setattr("lorazor.runtime.scheduler.STARVATION_SECONDS", limit)
        assert (steps_until_served(llm, tiny, 300) is not None) == served
        llm.llm_engine.abort_request(list(scheduler(llm).requests), internal=True)
        run(llm, tiny, [Ask(prompt(1, 4), tokens=2)])
