"""vLLM's worker with releases, and the calls that the endpoints and `lorazor collect` make."""

from __future__ import annotations

import logging
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from vllm.distributed import get_tp_group
from vllm.platforms import current_platform

from lorazor.policy.artifact import load_artifact
from lorazor.policy.fingerprint import fingerprint
from lorazor.runtime.config import runtime_config
from lorazor.runtime.core import ReleaseCore
from lorazor.runtime.runner import LoRazorRunner
from lorazor.runtime.shadow_room import scratch_bytes, shadow_rows, with_scratch
from lorazor.runtime.warmup import take_over_and_warm_up

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as StockWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as StockWorker

logger = logging.getLogger("vllm.lorazor")

# Preempted requests keep their history, so more can be followed than run at once.
FOLLOWED_PER_SEQUENCE = 4


def adapter_fingerprint(path: str) -> str | None:
    """The adapter's fingerprint, read again only when its files change; None where they cannot be read."""
    try:
        files = sorted((f.name, f.stat().st_mtime_ns, f.stat().st_size) for f in os.scandir(path))
        return _fingerprint(path, tuple(files))
    except Exception as error:  # whatever is wrong with the files, vLLM has loaded them: the request must go on
        logger.warning("LoRazor: %s has no fingerprint (%r); its requests keep it", path, error)
        return None


@lru_cache(maxsize=4096)
def _fingerprint(path: str, files: tuple[tuple[str, int, int], ...]) -> str:
    return fingerprint(path)


class LoRazorWorker(StockWorker):
    """Named by worker_cls."""

    def init_device(self) -> None:
        """Build the stock runner, then give it our class."""
        super().init_device()
        if self.use_v2_model_runner:
            from lorazor.runtime.runner_v2 import ReleaseRunner

            self.model_runner.__class__ = ReleaseRunner
        else:
            self.model_runner.__class__ = LoRazorRunner

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the base, then the policy: its fingerprint is that of the base's files, which are there only now.

        Raises:
            InputError: a damaged policy, or one for another base.
        """
        super().load_model(*args, **kwargs)
        take_over_and_warm_up(self.model_runner)
        config = runtime_config(self.vllm_config.additional_config)
        assert config is not None, "LoRazorWorker without the key lorazor in additional_config"
        artifact = load_artifact(config.policy, fingerprint(self._base_folder())) if config.policy else None
        capacity = FOLLOWED_PER_SEQUENCE * self.vllm_config.scheduler_config.max_num_seqs
        core = ReleaseCore(config, artifact, capacity, decides=get_tp_group().is_first_rank)
        self.model_runner.start_lorazor(core, adapter_fingerprint if artifact else lambda path: None)

    def determine_available_memory(self) -> int:
        """As vLLM's, less what the scratch blocks of shadow rows take."""
        free = int(super().determine_available_memory())
        return free - scratch_bytes(self.get_kv_cache_spec(), shadow_rows(self.vllm_config))

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Allocate the KV cache, with scratch blocks behind those that the scheduler gives out."""
        rows, blocks = shadow_rows(self.vllm_config), kv_cache_config.num_blocks
        super().initialize_from_config(with_scratch(kv_cache_config, rows))
        self.cache_config.num_gpu_blocks = blocks
        if rows:
            self.model_runner.use_scratch(blocks)

    def _base_folder(self) -> str:
        """Where the base's weights lie; a hub id stands for its local snapshot."""
        model: str = self.model_config.model
        if Path(model).is_dir():
            return model
        from huggingface_hub import snapshot_download

        cache = self.vllm_config.load_config.download_dir
        return snapshot_download(model, revision=self.model_config.revision, cache_dir=cache, local_files_only=True)

    @property
    def core(self) -> ReleaseCore:
        """The release core of this worker's runner."""
        core: ReleaseCore = self.model_runner.core
        return core

    def add_lora(self, lora_request: Any) -> bool:
        """Load an adapter; one that waits to be unloaded stays instead."""
        self.model_runner.keep_loaded(lora_request.lora_int_id)
        return bool(super().add_lora(lora_request))

    def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter; one that a live request still uses stays until that request is through with it."""
        return bool(self.model_runner.remove_when_idle(lora_id))

    def lorazor_traces(self, ids: list[str] | None = None) -> dict[str, dict[str, Any]]:
        """Return and forget recorded traces; see `Recorder.take`."""
        with self.core.lock:
            return self.core.recorder.take(ids)

    def lorazor_status(self) -> dict[str, Any]:
        """What this worker runs and has counted so far."""
        with self.core.lock:
            return self.core.status()

    def lorazor_request(self, request_id: str) -> dict[str, Any] | None:
        """The report of a live or recent request by the id that the client knows."""
        with self.core.lock:
            return self.core.reports.get(request_id)
