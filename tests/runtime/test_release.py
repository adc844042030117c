"""Releases on real vLLM against a plain transformers + PEFT loop, token for token in float32."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lorazor.runtime.counters import FAILURES
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
    worker,
)

pytestmark = pytest.mark.vllm

RELEASES: Sequence[int | None] = (1, 2, 3, 7, 12, 23, None)


@pytest.fixture(scope="module")
def llm(tiny: Tiny) -> Any:
    """No policy: forced releases alone. 64 tokens a step, so longer prompts are prefilled in chunks."""
    return engine(tiny, {"pinned": ["c"]})


def test_released_text_is_the_reference_loops(llm: Any, tiny: Tiny, reference: Reference) -> None:
    """Eight requests at once, two adapters and the base, mixed release steps and lengths: each has its own text."""
    asks = [Ask(prompt(k, 8 + 3 * k), "ab"[k % 2], r, tokens=16 + 2 * k) for k, r in enumerate(RELEASES)]
    asks.append(Ask(prompt(90, 20), None))
    for ask, output in zip(asks, run(llm, tiny, asks), strict=True):
        assert_text(tokens(output), reference, ask)
        if ask.adapter:
            reported = ask.release if isinstance(ask.release, int) and ask.release < ask.tokens else None
            assert released_at(output) == reported


@pytest.mark.parametrize("release", [1, 5, 12])
def test_never_released_and_base_texts_differ(tiny: Tiny, reference: Reference, release: int) -> None:
    """The tiny adapters are strong enough for these tests to mean something; no token before r changes."""
    ask = Ask(prompt(release, 14), "a", release)
    base = reference.text(ask.prompt, None, None, 24)
    never = reference.text(ask.prompt, "a", None, 24)
    released = reference.text(ask.prompt, "a", release, 24)
    assert base != never != released != base
    assert never[:release] == released[:release]


def test_chunked_prefill(llm: Any, tiny: Tiny, reference: Reference) -> None:
    """A prompt of several steps keeps its adapter in all of them, beside rows that are released meanwhile."""
    asks = [Ask(prompt(1, 10), "a", 3), Ask(prompt(2, 150), "b", 1), Ask(prompt(3, 130), "a", 4)]
    for ask, output in zip(asks, run(llm, tiny, asks), strict=True):
        assert_text(tokens(output), reference, ask)


def test_a_release_changes_no_other_request(llm: Any, tiny: Tiny) -> None:
    """The neighbours of a released request have the same tokens as beside one that never released."""
    others = [Ask(prompt(50 + k, 12), "ab"[k % 2]) for k in range(5)]
    beside_never = run(llm, tiny, [Ask(prompt(1, 9), "a", "never"), *others])
    beside_released = run(llm, tiny, [Ask(prompt(1, 9), "a", 2), *others])
    assert tokens(beside_never[0]) != tokens(beside_released[0])
    assert [tokens(o) for o in beside_never[1:]] == [tokens(o) for o in beside_released[1:]]


def test_same_prompt_with_different_releases_in_one_batch(llm: Any, tiny: Tiny, reference: Reference) -> None:
    """Requests are told apart by id, not by prompt or adapter."""
    asks = [Ask(prompt(7, 33), "b", r, tokens=30) for r in (None, 1, 9, 20)]
    for ask, output in zip(asks, run(llm, tiny, asks), strict=True):
        assert_text(tokens(output), reference, ask)


@pytest.mark.parametrize(("length", "release"), [(5, 1), (15, 1), (20, 6), (32, 3)])
def test_prefix_cache_never_mixes_released_blocks(
    llm: Any, tiny: Tiny, reference: Reference, length: int, release: int
) -> None:
    """After a release, the adapter's and the base's next turn over the same tokens get only clean blocks."""
    first = Ask(prompt(100 + length, length), "a", release, tokens=40)
    (output,) = run(llm, tiny, [first])
    assert_text(tokens(output), reference, first)
    turn = first.prompt + tuple(tokens(output))
    nexts = [Ask(turn, "a", tokens=12), Ask(turn, None, tokens=12), Ask(turn, "b", tokens=12)]
    for ask, following in zip(nexts, run(llm, tiny, nexts), strict=True):
        assert_text(tokens(following), reference, ask)
        clean = length + release - 1 if ask.adapter == "a" else 0
        assert following.num_cached_tokens <= clean


def test_a_released_request_shares_blocks_with_its_equals(llm: Any, tiny: Tiny, reference: Reference) -> None:
    """The adapter's clean blocks are still found by a second request of the same prompt."""
    asks = [Ask(prompt(77, 40), "a", 2), Ask(prompt(77, 40), "a", 2)]
    first, second = (run(llm, tiny, [ask])[0] for ask in asks)
    assert second.num_cached_tokens == 32
    assert tokens(first) == tokens(second)
    assert_text(tokens(first), reference, asks[0])


def test_pinned_adapter_is_never_released(llm: Any, tiny: Tiny, reference: Reference) -> None:
    """Even a forced step does not release it."""
    (output,) = run(llm, tiny, [Ask(prompt(3, 12), "c", 2)])
    assert_text(tokens(output), reference, Ask(prompt(3, 12), "c"))
    assert output.kv_transfer_params["lorazor"] == {"release_step": None, "arm": "pinned"}


def test_unreadable_options_are_refused(llm: Any, tiny: Tiny) -> None:
    """`vllm.LLM` raises a sentence that names the option and the value."""
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match=r"lorazor_release must be .never. or a release step.*'sometimes'"):
        run(llm, tiny, [Ask(prompt(3, 12), "a", "sometimes")])


def test_unreadable_options_that_get_through_keep_the_adapter(
    llm: Any, tiny: Tiny, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the API's check, such a request runs un-released and is counted."""
    monkeypatch.setattr("lorazor.runtime.validate.check_extra_args", lambda *args: None)
    before = counts(llm, FAILURES).get("options", 0)
    (output,) = run(llm, tiny, [Ask(prompt(3, 12), "a", "sometimes")])
    assert_text(tokens(output), reference, Ask(prompt(3, 12), "a"))
    assert counts(llm, FAILURES)["options"] == before + 1


def test_logprobs_stop_tokens_and_prompt_logprobs(llm: Any, tiny: Tiny, reference: Reference) -> None:
    """They work across a release and describe the released text."""
    text = reference.text(prompt(11, 10), "a", 3, 24)
    stop = text[9]
    sampling = f'{{"logprobs": 2, "prompt_logprobs": 1, "stop_token_ids": [{stop}]}}'
    (output,) = run(llm, tiny, [Ask(prompt(11, 10), "a", 3, sampling=sampling)])
    assert tokens(output) == text[: text.index(stop) + 1]
    assert len(output.outputs[0].logprobs) == len(tokens(output))
    assert len(output.prompt_logprobs) == 10
    assert released_at(output) == (3 if len(tokens(output)) > 3 else None)


def test_stop_string_reports_the_release(llm: Any, tiny: Tiny, reference: Reference) -> None:
    """A stop string ends the request in the frontend; the release step is known all the same."""
    text = reference.text(prompt(12, 10), "b", 2, 24)
    printable = next(k for k in range(8, 24) if 33 <= text[k] < 127 and text[k] not in text[:k])
    (output,) = run(llm, tiny, [Ask(prompt(12, 10), "b", 2, sampling=f'{{"stop": ["\\u{text[printable]:04x}"]}}')])
    assert output.outputs[0].finish_reason == "stop"
    assert released_at(output) == 2


def test_structured_output_across_a_release(llm: Any, tiny: Tiny) -> None:
    """A regular expression holds before and after the release, and the release is real."""
    sampling = '{"structured_outputs": {"regex": "[a-f]{20}[0-9]{20}"}}'
    never, released = run(llm, tiny, [Ask(prompt(5, 10), "a", r, tokens=40, sampling=sampling) for r in ("never", 5)])
    for output in (never, released):
        assert [32 <= t < 127 for t in tokens(output)] == [True] * 40
        assert output.outputs[0].text[:20].isalpha()
        assert output.outputs[0].text[20:].isdigit()
    assert tokens(never)[:5] == tokens(released)[:5]
    assert tokens(never) != tokens(released)


@pytest.mark.skipif(
    ON_V2 and not torch.cuda.is_available(), reason="Triton's interpreter cannot run V2's random sampling"
)
def test_seeded_siblings(llm: Any, tiny: Tiny) -> None:
    """n = 2 with a seed: both siblings are released, repeatably, and the client is told of each."""
    ask = Ask(prompt(6, 10), "a", 4, sampling='{"temperature": 1.0, "seed": 7, "n": 2}')
    first, again = (run(llm, tiny, [ask])[0] for _ in range(2))
    (never,) = run(llm, tiny, [Ask(ask.prompt, "a", "never", sampling=ask.sampling)])
    for k in range(2):
        assert tokens(first, k) == tokens(again, k)
        assert tokens(first, k)[:4] == tokens(never, k)[:4]
        assert tokens(first, k) != tokens(never, k)
    assert [c["release_step"] for c in first.kv_transfer_params["lorazor"]["choices"]] == [4, 4]


def test_unloading_waits_for_the_last_request(llm: Any, tiny: Tiny, reference: Reference, tmp_path: Path) -> None:
    """An adapter unloaded in mid-flight, its files gone, serves its live request to the end and is then dropped."""
    from vllm.lora.request import LoRARequest

    shutil.copytree(tiny.adapters["b"], tmp_path / "b")
    request = LoRARequest("moved", 9, str(tmp_path / "b"))
    core = llm.llm_engine
    ask = Ask(prompt(8, 10), "b", tokens=20)
    core.add_request("moving", {"prompt_token_ids": list(ask.prompt)}, ask.params(), lora_request=request)
    for _ in range(5):
        core.step()
    core.remove_lora(9)
    shutil.rmtree(tmp_path / "b")
    outputs = [o for _ in range(40) if core.has_unfinished_requests() for o in core.step() if o.finished]
    assert_text(tokens(outputs[0]), reference, ask)
    run(llm, tiny, [Ask(prompt(1, 4), tokens=2)])
    assert 9 not in core.list_loras()


def test_reloading_in_mid_flight(llm: Any, tiny: Tiny, reference: Reference) -> None:
    """An adapter unloaded and loaded again while its request runs serves it to the end, and stays loaded."""
    core = llm.llm_engine
    ask = Ask(prompt(13, 10), "b", 12, tokens=20)
    core.add_request("reload", {"prompt_token_ids": list(ask.prompt)}, ask.params(), lora_request=lora(tiny, "b"))
    for _ in range(4):
        core.step()
    core.remove_lora(lora(tiny, "b").lora_int_id)
    core.step()
    core.add_lora(lora(tiny, "b"))
    outputs = [o for _ in range(40) if core.has_unfinished_requests() for o in core.step() if o.finished]
    assert_text(tokens(outputs[0]), reference, ask)
    run(llm, tiny, [Ask(prompt(1, 4), tokens=2)])
    assert lora(tiny, "b").lora_int_id in core.list_loras()


def test_abort_leaves_nothing_behind(llm: Any, tiny: Tiny) -> None:
    """An aborted request is forgotten by the core at the next step."""
    core = llm.llm_engine
    core.add_request("gone", {"prompt_token_ids": [1, 2, 3]}, Ask((), "a", 2).params(), lora_request=lora(tiny, "a"))
    for _ in range(3):
        core.step()
    core.abort_request(["gone"])
    run(llm, tiny, [Ask(prompt(1, 4), tokens=2)])
    run(llm, tiny, [Ask(prompt(1, 4), tokens=2)])
    assert worker(llm).core.status()["live_requests"] == 0
    assert not scheduler(llm).requests


@pytest.mark.slow
@pytest.mark.skipif(ON_V2 and not torch.cuda.is_available(), reason="thousands of interpreted steps take minutes")
def test_long_outputs(tiny: Tiny, reference: Reference) -> None:
    """4,000 tokens, released late, beside short requests that come and go: the reference's text to the end."""
    llm = engine(tiny, {}, max_model_len=4096, max_num_seqs=4)
    asks = [Ask(prompt(1, 10), "a", 1500, tokens=4000)]
    asks += [Ask(prompt(2 + k, 10), "b", 1 + 40 * k, tokens=400) for k in range(8)]
    outputs = run(llm, tiny, asks)
    for ask, output in zip(asks[:2], outputs, strict=False):
        assert released_at(output) == ask.release
        assert_text(tokens(output), reference, ask)
