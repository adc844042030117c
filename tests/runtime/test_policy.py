"""Releases that a policy decides, and everything that may go wrong with one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lorazor.policy.rule import in_fraction
from lorazor.runtime.counters import FAILURES
from lorazor.runtime.guard import GuardedScorer
from tests.runtime.policies import make_policy, safe_from_step
from tests.runtime.tiny import (
    PROBING,
    SIGNALS,
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
    tokens,
    worker,
)

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def llm(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A policy that releases at the first decision step from 6 on: c = 8, so r = 10."""
    folder = Path(tmp_path_factory.mktemp("policy")) / "artifact"
    return engine(tiny, {"policy": make_policy(folder, tiny, safe_from_step(6)), "policy_timeout": 5.0}, max_loras=3)


@pytest.fixture
def core(llm: Any) -> Iterator[Any]:
    """The worker's core; its guarded scorer is put back afterwards."""
    core = worker(llm).core
    score = core.followed.score
    yield core
    core.followed.score = score


def test_release_at_the_step_that_the_policy_chose(llm: Any, tiny: Tiny, reference: Reference) -> None:
    """Score reaches the threshold at c = 8: release step 10, and the text is the reference's with that boundary."""
    asks = [Ask(prompt(k, 10 + 7 * k), "ab"[k % 2]) for k in range(4)] + [Ask(prompt(9, 9))]
    outputs = run(llm, tiny, asks)
    for ask, output in zip(asks[:4], outputs, strict=False):
        assert released_at(output) == 10
        assert output.kv_transfer_params["lorazor"]["arm"] == "policy"
        assert_text(tokens(output), reference, Ask(ask.prompt, ask.adapter, 10))
    assert_text(tokens(outputs[4]), reference, asks[4])
    assert outputs[4].kv_transfer_params is None


@pytest.mark.parametrize(
    ("extra", "release", "arm"),
    [
        ({"lorazor_release": "never"}, None, "never"),
        ({"lorazor_release": 5}, 5, "forced"),
        ({"lorazor_threshold": 1.0}, None, "policy"),
        ({"lorazor_threshold": 0.0}, 1, "policy"),
        ({"lorazor_task": "closed"}, None, "policy"),
        ({"lorazor_task": "closed", "lorazor_threshold": 0.5}, 10, "policy"),
        ({"lorazor_task": "nobody"}, None, "unknown_task"),
    ],
)
def test_a_request_chooses(
    llm: Any, tiny: Tiny, reference: Reference, extra: dict[str, Any], release: int | None, arm: str
) -> None:
    """Never, a step, a threshold or a task of its own; a threshold of 0 releases at admission."""
    ask = Ask(prompt(3, 11), "a")
    params = ask.params()
    params.extra_args = extra

    (output,) = llm.generate(
        [{"prompt_token_ids": list(ask.prompt)}], params, lora_request=lora(tiny, "a"), use_tqdm=False
    )
    assert output.kv_transfer_params["lorazor"] == {"release_step": release, "arm": arm}
    assert_text(tokens(output), reference, Ask(ask.prompt, "a", release))


def test_an_unknown_adapter_is_never_released(llm: Any, tiny: Tiny, reference: Reference) -> None:
    """The policy does not know c's weights: it stays, and is counted."""
    (output,) = run(llm, tiny, [Ask(prompt(2, 9), "c")])
    assert output.kv_transfer_params["lorazor"] == {"release_step": None, "arm": "unknown_adapter"}
    assert_text(tokens(output), reference, Ask(prompt(2, 9), "c"))
    assert counts(llm, "lorazor_unknown_total")["adapter"] >= 1


def test_reports_by_public_id(llm: Any, tiny: Tiny) -> None:
    """The server can tell about a request after its end: adapter, task, arm, release step, score."""
    (output,) = run(llm, tiny, [Ask(prompt(2, 9), "b")])
    run(llm, tiny, [Ask(prompt(2, 9), tokens=2)])
    (report,) = llm.collective_rpc("lorazor_request", args=(output.request_id,))
    assert report["release_step"] == 10
    assert report["score"] >= 0.9
    assert (report["adapter"], report["task"], report["output_tokens"]) == ("b", "open", 24)
    assert llm.collective_rpc("lorazor_request", args=("nobody",)) == [None]


def broken(kind: str) -> Any:
    """A scorer that fails in one way."""

    def score(features: Any) -> Any:
        if kind == "exception":
            raise ValueError("broken")
        if kind == "timeout":
            time.sleep(1.0)
        return np.full(len(features) + (kind == "shape"), np.nan if kind == "nan" else 1.0)

    return score


@pytest.mark.parametrize("kind", ["exception", "nan", "timeout", "shape"])
def test_a_failing_policy_changes_no_request(
    llm: Any, core: Any, tiny: Tiny, reference: Reference, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Whatever the policy does on the host, the request runs on with its adapter, and the failure is counted."""
    monkeypatch.setattr(worker(llm).model_runner, "device_policy", None, raising=False)
    core.followed.score = GuardedScorer(broken(kind), 0.3, core.counters.add_failures)
    before = counts(llm, FAILURES).get(kind, 0)
    ask = Ask(prompt(4, 12), "a")
    (output,) = run(llm, tiny, [ask])
    assert released_at(output) is None
    assert_text(tokens(output), reference, ask)
    assert counts(llm, FAILURES)[kind] > before


def test_a_failing_probe_changes_no_request(
    llm: Any, core: Any, tiny: Tiny, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Probing that raises is switched off; without a probe nothing is decided."""

    def fail(*args: Any) -> None:
        raise RuntimeError("no probe today")

    runner = worker(llm).model_runner
    monkeypatch.setattr(PROBING, fail)
    try:
        ask = Ask(prompt(4, 12), "b")
        (output,) = run(llm, tiny, [ask])
    finally:
        runner._probes_work = True
    assert released_at(output) is None
    assert_text(tokens(output), reference, ask)
    assert counts(llm, FAILURES)["probe"] == 1
    assert counts(llm, FAILURES)["missing_probe"] >= 1


@pytest.mark.parametrize("where", [SIGNALS, "lorazor.runtime.core.ReleaseCore._observe"])
def test_failing_signals_change_no_request(
    llm: Any, tiny: Tiny, reference: Reference, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A bug in signals or decisions costs the releases of that step's requests; the next request is as ever."""

    def fail(*args: Any) -> None:
        raise RuntimeError("no signals today")

    ask, failed = Ask(prompt(4, 12), "a"), counts(llm, FAILURES).get("signals", 0)
    with monkeypatch.context() as patch:
        patch.setattr(where, fail)
        (output,) = run(llm, tiny, [ask])
    assert released_at(output) is None
    assert_text(tokens(output), reference, ask)
    assert counts(llm, FAILURES)["signals"] == failed + 1
    assert released_at(run(llm, tiny, [ask])[0]) == 10


def test_release_fraction_splits_by_id() -> None:
    """A third of many ids falls into a fraction of one third, and always the same ones."""
    ids = [f"chatcmpl-{k}" for k in range(6000)]
    chosen = [i for i in ids if in_fraction(i, 1 / 3)]
    assert len(chosen) == pytest.approx(2000, abs=150)
    assert set(chosen) <= {i for i in ids if in_fraction(i, 0.5)}
    assert not any(in_fraction(i, 0.0) for i in ids)
    assert all(in_fraction(i, 1.0) for i in ids)


def test_control_arm_is_never_released(llm: Any, core: Any, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a release fraction of 0 every request is in the control arm."""
    monkeypatch.setattr(core.arms, "config", core.config.model_copy(update={"release_fraction": 0.0}))
    (output,) = run(llm, tiny, [Ask(prompt(2, 9), "b")])
    assert output.kv_transfer_params["lorazor"] == {"release_step": None, "arm": "control"}


@pytest.mark.parametrize("what", ["base", "missing"])
def test_a_bad_artifact_stops_the_start(tiny: Tiny, tmp_path: Path, what: str) -> None:
    """A policy for another base, or none at the path: the engine does not start, and the sentence names it."""
    other = Tiny(tiny.adapters["a"], tiny.adapters)
    folder = tmp_path / "artifact"
    if what == "base":
        make_policy(folder, other, safe_from_step(6))
    # On V2 one that is missing is found when vLLM builds its configuration, which wraps the sentence.
    with pytest.raises(ValueError, match="base_fingerprint" if what == "base" else "no such policy artifact"):
        engine(tiny, {"policy": str(folder)})
