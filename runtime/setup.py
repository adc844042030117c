"""Turns one engine into a LoRazor engine: refuses what does not work, then names our worker and scheduler."""

from __future__ import annotations

from typing import Any

from lorazor.features.errors import InputError
from lorazor.runtime.compat import require_supported_vllm

WORKER = "lorazor.runtime.worker.LoRazorWorker"
SCHEDULER = "lorazor.runtime.scheduler.LoRazorScheduler"


def prepare(vllm_config: Any) -> None:
    """Set worker_cls and scheduler_cls; runs again in the engine's process, so repeating it changes nothing.

    Raises:
        InputError: this vLLM, or an option beside LoRazor, is not supported; the sentence names it.
    """
    require_supported_vllm()
    _refuse(vllm_config)
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    if parallel.worker_cls not in ("auto", WORKER):
        raise InputError(f"worker_cls must be left to LoRazor, got {parallel.worker_cls}")
    if scheduler.scheduler_cls not in (None, SCHEDULER):
        raise InputError(f"scheduler_cls must be left to LoRazor, got {scheduler.scheduler_cls}")
    parallel.worker_cls = WORKER
    scheduler.scheduler_cls = SCHEDULER
    # Decisions ride home with the sampled tokens of a synchronous step; asynchronous scheduling needs runner V2.
    scheduler.async_scheduling = False


def _refuse(vllm_config: Any) -> None:
    from vllm.platforms import current_platform

    parallel = vllm_config.parallel_config
    rules = {
        "LoRA is off: add --enable-lora": vllm_config.lora_config is None,
        "speculative decoding is not supported: remove --speculative-config": vllm_config.speculative_config,
        "pipeline parallelism is not supported: set --pipeline-parallel-size 1": parallel.pipeline_parallel_size > 1,
        "tensor parallelism is not supported yet: set --tensor-parallel-size 1": parallel.tensor_parallel_size > 1,
        "KV transfer is not supported: remove --kv-transfer-config": vllm_config.kv_transfer_config,
        "pooling models are not supported": vllm_config.model_config.runner_type == "pooling",
        "dual-batch overlap is not supported: remove --enable-dbo": parallel.enable_dbo,
        "--specialize-active-lora drops adapters in mixed batches: remove it": getattr(
            vllm_config.lora_config, "specialize_active_lora", False
        ),
    }
    if not current_platform.is_cpu():
        rules["model runner V2 is not supported yet: set VLLM_USE_V2_MODEL_RUNNER=0"] = vllm_config.use_v2_model_runner
        rules["CUDA graphs are not supported yet: add --enforce-eager"] = not vllm_config.model_config.enforce_eager
    for sentence, broken in rules.items():
        if broken:
            raise InputError(f"LoRazor: {sentence}")
