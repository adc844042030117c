"""Turns one engine into a LoRazor engine: refuses what does not work, then names our worker and scheduler.

Two kinds, by vLLM's model runner. V1: releases. V2 (CUDA only, and its default there): the active-row kernels alone,
under vLLM's own scheduler.
"""

from __future__ import annotations

from typing import Any

import torch

from lorazor.features.errors import InputError
from lorazor.runtime.compat import kernels_alone, require_supported_vllm
from lorazor.runtime.config import RuntimeConfig, runtime_config
from lorazor.runtime.shadow_room import make_room

WORKER = "lorazor.runtime.worker.LoRazorWorker"
KERNEL_WORKER = "lorazor.runtime.worker_v2.KernelWorker"
SCHEDULER = "lorazor.runtime.scheduler.LoRazorScheduler"
ASYNC_SCHEDULER = "lorazor.runtime.scheduler.LoRazorAsyncScheduler"
MAX_RANK = 256  # what the kernels' tiles have room for


def prepare(vllm_config: Any) -> None:
    """Set worker_cls, and for releases scheduler_cls; runs again in the engine's process, where it changes nothing.

    Raises:
        InputError: this vLLM, or an option beside LoRazor, is not supported; the sentence names it.
    """
    require_supported_vllm()
    config = runtime_config(vllm_config.additional_config)
    assert config is not None, "prepare() without the key lorazor in additional_config"
    alone = kernels_alone(vllm_config)
    particular = _without_kernels_alone(config) if alone else _without_releases(vllm_config)
    for sentence, broken in {**_never(vllm_config), **particular}.items():
        if broken:
            raise InputError(f"LoRazor: {sentence}")
    _name_worker(vllm_config.parallel_config, KERNEL_WORKER if alone else WORKER)
    if not alone:
        _name_scheduler(vllm_config.scheduler_config)
        if config.policy is not None:
            make_room(vllm_config)


def _name_worker(parallel: Any, worker: str) -> None:
    if parallel.worker_cls not in ("auto", worker):
        raise InputError(f"worker_cls must be left to LoRazor, got {parallel.worker_cls}")
    parallel.worker_cls = worker


def _name_scheduler(scheduler: Any) -> None:
    if scheduler.scheduler_cls not in (None, SCHEDULER, ASYNC_SCHEDULER):
        raise InputError(f"scheduler_cls must be left to LoRazor, got {scheduler.scheduler_cls}")
    scheduler.scheduler_cls = SCHEDULER
    # Decisions ride home with the sampled tokens of a synchronous step; asynchronous scheduling needs runner V2.
    scheduler.async_scheduling = False


def _never(vllm_config: Any) -> dict[str, Any]:
    """Sentence -> whether it applies: what is refused on either runner."""
    from vllm.platforms import current_platform

    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    on_cpu, rank = current_platform.is_cpu(), getattr(vllm_config.lora_config, "max_lora_rank", 0)
    return {
        "LoRA is off: add --enable-lora": vllm_config.lora_config is None,
        "speculative decoding is not supported: remove --speculative-config": vllm_config.speculative_config,
        "pipeline parallelism is not supported: set --pipeline-parallel-size 1": parallel.pipeline_parallel_size > 1,
        "KV transfer is not supported: remove --kv-transfer-config": vllm_config.kv_transfer_config,
        "pooling models are not supported": model.runner_type == "pooling",
        "dual-batch overlap is not supported: remove --enable-dbo": parallel.enable_dbo,
        "--specialize-active-lora drops adapters in mixed batches: remove it": getattr(
            vllm_config.lora_config, "specialize_active_lora", False
        ),
        "float32 adapters run outside CUDA graphs: add --enforce-eager, or set --dtype bfloat16": not on_cpu
        and model.dtype == torch.float32
        and not model.enforce_eager,
        f"the kernels take ranks up to {MAX_RANK}: --max-lora-rank is {rank}": not on_cpu and rank > MAX_RANK,
    }


def _without_kernels_alone(config: RuntimeConfig) -> dict[str, Any]:
    """What model runner V2 does not have yet."""
    return {
        "a policy needs model runner V1 yet: set VLLM_USE_V2_MODEL_RUNNER=0": config.policy is not None,
        "recording needs model runner V1 yet: set VLLM_USE_V2_MODEL_RUNNER=0": config.record,
    }


def _without_releases(vllm_config: Any) -> dict[str, Any]:
    """What releases do not go with yet."""
    sentence = "releases are not supported with tensor parallelism yet: set --tensor-parallel-size 1"
    return {sentence: vllm_config.parallel_config.tensor_parallel_size > 1}
