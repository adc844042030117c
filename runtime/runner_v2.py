"""Model runner V2 with the active-row kernels alone: no releases, so asynchronous scheduling and every graph stay."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.v1.worker.gpu.lora_utils import LoraState
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from lorazor.runtime.active_loras import ActiveLoras


class ArrayLoraState(LoraState):
    """vLLM's table of each request's adapter, answering in arrays where stock makes a Python object of every token."""

    def make_lora_inputs(
        self, req_ids: list[str], idx_mapping: NDArray[np.int32], num_scheduled_tokens: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], set[Any]]:
        """The adapter ids of the step's rows and of its tokens, and the requests' adapters."""
        ids = self.lora_ids[idx_mapping]
        return ids, ids.repeat(num_scheduled_tokens), self.get_activate_loras(req_ids)


class KernelRunner(ActiveLoras, GPUModelRunner):
    """Given to the built runner as its class by the worker."""
