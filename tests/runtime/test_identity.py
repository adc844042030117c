"""What must not change: stock engines, and engines whose policy never releases."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from lorazor.features.errors import InputError
from lorazor.runtime.adapter_queue import AdapterQueue
from lorazor.runtime.patches import LEDGER
from lorazor.runtime.punica import ActiveRowPunica
from lorazor.runtime.request import ReleasableRequest
from lorazor.runtime.runner import LoRazorRunner
from lorazor.runtime.scheduler import LoRazorScheduler
from lorazor.runtime.swaps import Swaps
from tests.runtime.policies import make_policy, safe_from_step
from tests.runtime.tiny import (
    ON_V2,
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
    worker,
)

pytestmark = pytest.mark.vllm

# All rows of a batch hold an adapter: stock CPU LoRA is wrong beside rows without one.
ASKS = [Ask(prompt(k, 9 + 5 * k), "ab"[k % 2], tokens=32) for k in range(6)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="stock CUDA LoRA kernels have no float32")
def test_without_our_key_the_engine_is_stock(tiny: Tiny, reference: Reference) -> None:
    """The installed plugin leaves worker, scheduler, runner and LoRA layers alone."""
    llm = engine(tiny, None)
    assert not isinstance(scheduler(llm), LoRazorScheduler)
    for part in (worker(llm), worker(llm).model_runner, scheduler(llm)):
        assert type(part).__module__.startswith("vllm.")
    wrappers = worker(llm).model_runner.lora_manager._adapter_manager.punica_wrapper_mapping.values()
    assert all(type(w).__module__.startswith("vllm.") for w in wrappers)
    outputs = run(llm, tiny, ASKS)
    assert all(o.kv_transfer_params is None for o in outputs)
    for ask, output in zip(ASKS, outputs, strict=True):
        assert_text(tokens(output), reference, ask)


def test_a_policy_that_never_releases_changes_no_token(tiny: Tiny, reference: Reference, tmp_path: Path) -> None:
    """With probes and scores at every decision step, but no threshold reached, the text is the never-released one."""
    policy = make_policy(tmp_path / "artifact", tiny, safe_from_step(6), threshold=1.0)
    llm = engine(tiny, {"policy": policy})
    outputs = run(llm, tiny, ASKS)
    for ask, output in zip(ASKS, outputs, strict=True):
        assert_text(tokens(output), reference, ask)
    counted = {name: n for name, _, n in llm.collective_rpc("lorazor_status")[0]["counts"]}
    assert counted["lorazor_probes_total"] >= 6 * 8
    assert "lorazor_releases_total" not in counted


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"enable_lora": False}, "LoRA is off"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative decoding"),
        ({"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}, "pipeline parallelism"),
        ({"scheduler_cls": "somebody.Else"}, "scheduler_cls"),
        ({"additional_config": {"lorazor": {"polcy": "x"}}}, "lorazor.polcy"),
        ({"additional_config": {"lorazor": {"release_fraction": 1.5}}}, "release_fraction"),
    ],
)
def test_what_does_not_work_is_refused_at_the_start(tiny: Tiny, options: dict[str, Any], sentence: str) -> None:
    """One sentence names the option."""
    with pytest.raises((InputError, ValueError), match=sentence):
        engine(tiny, {}, **options)


def test_an_unknown_vllm_is_refused(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence names the supported versions."""
    monkeypatch.setattr("vllm.version.__version__", "0.99.0")
    with pytest.raises((InputError, ValueError), match=r"vLLM 0\.99\.0 is not supported.*0\.26\.0 and 0\.27\.1"):
        engine(tiny, {})


@pytest.mark.skipif(not ON_V2, reason="on model runner V2")
def test_the_ledger_of_runner_v2(tiny: Tiny) -> None:
    """Its model, its table of adapters and its class are replaced, in the instances alone."""
    runner = worker(engine(tiny, {})).model_runner
    replaced = {name for name in ("compute_logits", "forward") if name in vars(runner.model)}
    named = {p.target for p in LEDGER if "runner V2" in p.where and "(instance)" in p.where}
    assert replaced | {"run_fullgraph", "lora_state"} == named
    assert type(runner.lora_state).__module__ == "lorazor.runtime.lora_state"


@pytest.mark.skipif(ON_V2, reason="on model runner V1")
def test_the_ledger_names_what_is_replaced(tiny: Tiny) -> None:
    """In a running engine on model runner V1 exactly the ledger's entries are replaced, and each only once."""
    from vllm.platforms import current_platform
    from vllm.v1.engine.input_processor import InputProcessor

    from lorazor.runtime.plugin import register

    register()
    llm = engine(tiny, {})
    params = Ask((), tokens=2).params()
    llm.llm_engine.add_request("one", {"prompt_token_ids": [1, 2, 3]}, params, lora_request=lora(tiny, "a"))
    (request,) = scheduler(llm).requests.values()
    llm.llm_engine.abort_request(["one"])
    runner = worker(llm).model_runner
    manager = runner.lora_manager._adapter_manager
    wrappers = manager.punica_wrapper_mapping.values()
    patched = [current_platform.check_and_update_config, InputProcessor._validate_params]
    found = {
        "check_and_update_config": [hasattr(patched[0], "lorazor_original")],
        "_validate_params": [hasattr(patched[1], "lorazor_original")],
        "__class__": [type(runner) is LoRazorRunner, type(request) is ReleasableRequest],
        "waiting": [type(scheduler(llm).waiting) is AdapterQueue],
        "skipped_waiting": [type(scheduler(llm).skipped_waiting) is AdapterQueue],
        "activate_adapter": [type(manager.activate_adapter.__self__) is Swaps],
        "punica_wrapper": [all(type(w) is ActiveRowPunica for w in wrappers)],  # float32
    }
    v1 = [p for p in LEDGER if "V2" not in p.where or "V1" in p.where]
    assert Counter(p.target for p in v1) == {target: len(there) for target, there in found.items()}
    assert all(all(there) for there in found.values())
    assert not any(hasattr(p.lorazor_original, "lorazor_original") for p in patched)
    assert all(p.why and p.until for p in LEDGER)
