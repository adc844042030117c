"""Turns one engine into a LoRazor engine: refuses what does not work, then names our worker and scheduler.

On either model runner of vLLM: V2 (CUDA only, and its default there) keeps asynchronous scheduling, V1 loses it.
"""

from __future__ import annotations

from typing import Any

import torch

from lorazor.features.errors import InputError
from lorazor.runtime.compat import require_supported_vllm
from lorazor.runtime.config import runtime_config
from lorazor.runtime.shadow_room import make_room

WORKER = "lorazor.runtime.worker.LoRazorWorker"
SCHEDULER = "lorazor.runtime.scheduler.LoRazorScheduler"
ASYNC_SCHEDULER = "lorazor.runtime.scheduler.LoRazorAsyncScheduler"
MAX_RANK = 256  # what the kernels' tiles have room for


def prepare(vllm_config: Any) -> None:
    """Set worker_cls and scheduler_cls; runs again in the engine's process, where it changes nothing.

    Raises:
        InputError: this vLLM, or an option beside LoRazor, is not supported; the sentence names it.
    """
    require_supported_vllm()
    config = runtime_config(vllm_config.additional_config)
    assert config is not None, "prepare() without the key lorazor in additional_config"
    for sentence, broken in _never(vllm_config).items():
        if broken:
            raise InputError(f"LoRazor: {sentence}")
    _name_worker(vllm_config.parallel_config)
    _name_scheduler(vllm_config)
    if config.policy is not None:
        make_room(vllm_config, config.policy)


def _name_worker(parallel: Any) -> None:
    if parallel.worker_cls not in ("auto", WORKER):
        raise InputError(f"worker_cls must be left to LoRazor, got {parallel.worker_cls}")
    parallel.worker_cls = WORKER


def _name_scheduler(vllm_config: Any) -> None:
    scheduler = vllm_config.scheduler_config
    if scheduler.scheduler_cls not in (None, SCHEDULER, ASYNC_SCHEDULER):
        raise InputError(f"scheduler_cls must be left to LoRazor, got {scheduler.scheduler_cls}")
    # On V1 decisions come home with the tokens of a synchronous step.
    scheduler.async_scheduling = bool(scheduler.async_scheduling) and _overlaps(vllm_config)
    scheduler.scheduler_cls = ASYNC_SCHEDULER if scheduler.async_scheduling else SCHEDULER


def _overlaps(vllm_config: Any) -> bool:
    from vllm.platforms import current_platform

    return bool(vllm_config.use_v2_model_runner) and not current_platform.is_cpu()


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
