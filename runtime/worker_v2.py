"""vLLM's worker on model runner V2 with the active-row kernels alone."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from lorazor.runtime.config import runtime_config
from lorazor.runtime.lora_state import ArrayLoraState
from lorazor.runtime.runner_v2 import KernelRunner
from lorazor.runtime.warmup import take_over_and_warm_up


class KernelWorker(Worker):
    """Named by worker_cls where the engine uses model runner V2."""

    def init_device(self) -> None:
        """Build the stock runner, then give it our class and our table of adapters."""
        super().init_device()
        self.model_runner.__class__ = KernelRunner
        self.model_runner.lora_state = ArrayLoraState(self.model_runner.max_num_reqs)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the base, then put our wrappers into its LoRA layers."""
        super().load_model(*args, **kwargs)
        take_over_and_warm_up(self.model_runner)

    def lorazor_traces(self, ids: list[str] | None = None) -> dict[str, dict[str, Any]]:
        """Nothing: recording needs model runner V1."""
        return {}

    def lorazor_status(self) -> dict[str, Any]:
        """As `LoRazorWorker.lorazor_status`, with nothing released and nothing counted."""
        config = runtime_config(self.vllm_config.additional_config)
        assert config is not None, "KernelWorker without the key lorazor in additional_config"
        return {"config": config.model_dump(), "policy": None, "live_requests": 0, "counts": []}

    def lorazor_request(self, request_id: str) -> dict[str, Any] | None:
        """None: no request is followed here."""
        return None
