"""What an engine may ask for beside LoRazor on each model runner, and which worker and scheduler it gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lorazor.features.errors import InputError
from lorazor.runtime.setup import ASYNC_SCHEDULER, SCHEDULER, WORKER, prepare

pytestmark = pytest.mark.vllm


def config(v2: bool, lorazor: dict[str, Any] | None = None, **changes: Any) -> Any:
    """A vLLM configuration with what `prepare` reads; `changes` name fields, as in model__dtype."""
    made = SimpleNamespace(
        additional_config={"lorazor": lorazor or {}},
        use_v2_model_runner=v2,
        lora_config=SimpleNamespace(specialize_active_lora=False, max_lora_rank=256),
        speculative_config=None,
        kv_transfer_config=None,
        model_config=SimpleNamespace(runner_type="generate", dtype=torch.bfloat16, enforce_eager=False),
        parallel_config=SimpleNamespace(
            worker_cls="auto", pipeline_parallel_size=1, tensor_parallel_size=1, enable_dbo=False
        ),
        scheduler_config=SimpleNamespace(
            scheduler_cls=None, async_scheduling=True, max_num_seqs=128, max_num_batched_tokens=8192
        ),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[], max_cudagraph_capture_size=0),
    )
    for path, value in changes.items():
        *parts, field = path.split("__")
        setattr(getattr(made, f"{parts[0]}_config") if parts else made, field, value)
    return made


def scheduling(asked: Any) -> tuple[str, bool]:
    """The scheduler that was named, and whether steps overlap."""
    return asked.scheduler_config.scheduler_cls, asked.scheduler_config.async_scheduling


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's platform is not a CPU."""
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("overlap", [False, True])
def test_v2_keeps_asynchronous_scheduling(probed_policy: str, overlap: bool) -> None:
    """Where it is on; tensor parallelism and a second call are fine."""
    for ours in ({}, {"policy": probed_policy}, {"record": True, "probe_interval": 4}):
        asked = config(True, ours, parallel__tensor_parallel_size=4, scheduler__async_scheduling=overlap)
        named = ASYNC_SCHEDULER if overlap else SCHEDULER, overlap
        for _ in range(2):
            prepare(asked)
            assert asked.parallel_config.worker_cls == WORKER
            assert scheduling(asked) == named


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("eager", [False, True])
def test_v1_loses_asynchronous_scheduling(probed_policy: str, eager: bool) -> None:
    """With a policy or without, in CUDA graphs or not."""
    for ours in ({}, {"policy": probed_policy}, {"record": True, "probe_interval": 4}):
        asked = config(False, ours, model__enforce_eager=eager)
        for _ in range(2):
            prepare(asked)
            assert asked.parallel_config.worker_cls == WORKER
            assert scheduling(asked) == (SCHEDULER, False)


def test_a_cpu_never_overlaps_steps() -> None:
    """There is no model runner V2 without Triton, and vLLM turns asynchronous scheduling off on CPUs."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("this is a CUDA machine")
    asked = config(True, model__dtype=torch.float32)
    prepare(asked)
    assert asked.parallel_config.worker_cls == WORKER
    assert scheduling(asked) == (SCHEDULER, False)


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(
    ("v2", "ours", "changes", "sentence"),
    [
        (True, {}, {"parallel__worker_cls": "somebody.Else"}, "worker_cls must be left"),
        (False, {}, {"scheduler__scheduler_cls": "somebody.Else"}, "scheduler_cls must be left"),
        (True, {}, {"model__dtype": torch.float32}, "float32 adapters run outside CUDA graphs: add --enforce-eager"),
        (False, {}, {"model__dtype": torch.float32}, "float32 adapters run outside CUDA graphs"),
        (True, {}, {"lora__max_lora_rank": 320}, "ranks up to 256: --max-lora-rank is 320"),
        (True, {}, {"lora_config": None}, "LoRA is off"),
        (True, {}, {"speculative_config": object()}, "speculative decoding"),
        (True, {}, {"kv_transfer_config": object()}, "KV transfer"),
        (True, {}, {"parallel__pipeline_parallel_size": 2}, "pipeline parallelism"),
        (True, {}, {"parallel__enable_dbo": True}, "dual-batch overlap"),
        (True, {}, {"model__runner_type": "pooling"}, "pooling models"),
        (True, {}, {"lora__specialize_active_lora": True}, "--specialize-active-lora"),
    ],
)
def test_refused(v2: bool, ours: dict[str, Any], changes: dict[str, Any], sentence: str) -> None:
    """What does not work on that runner is refused in one sentence, before anything is set."""
    asked = config(v2, ours, **changes)
    with pytest.raises(InputError, match=sentence) as caught:
        prepare(asked)
    assert "\n" not in str(caught.value)
