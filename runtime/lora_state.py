"""Model runner V2's table of each request's adapter: in arrays, and under the boundary rule."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.v1.worker.gpu.lora_utils import LoraState


class ArrayLoraState(LoraState):
    """vLLM's table of each request's adapter, answering in arrays where stock makes a Python object of every token."""

    def make_lora_inputs(
        self, req_ids: list[str], idx_mapping: NDArray[np.int32], num_scheduled_tokens: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], set[Any]]:
        """The adapter ids of the step's rows and of its tokens, and the requests' adapters."""
        ids = self.lora_ids[idx_mapping]
        return ids, ids.repeat(num_scheduled_tokens), self.get_activate_loras(req_ids)


class ReleasableLoraState(ArrayLoraState):
    """The same under the boundary rule; `active` holds how many of each request's tokens in this step keep theirs."""

    def __init__(self, max_num_reqs: int) -> None:
        super().__init__(max_num_reqs)
        self.active: dict[str, int] = {}

    def make_lora_inputs(
        self, req_ids: list[str], idx_mapping: NDArray[np.int32], num_scheduled_tokens: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], set[Any]]:
        """As stock's, with 0 for the tokens (and for the rows whose last token is one) at or past a boundary."""
        ids = self.lora_ids[idx_mapping]
        active = np.array([self.active.get(request_id, 0) for request_id in req_ids], np.int32)
        lengths = np.stack([active, num_scheduled_tokens - active], axis=1).ravel()
        tokens = np.stack([ids, np.zeros_like(ids)], axis=1).ravel().repeat(lengths)
        return np.where(active == num_scheduled_tokens, ids, 0), tokens, self.get_activate_loras(req_ids)

    def get_activate_loras(self, req_ids: list[str]) -> set[Any]:
        """The adapters that some token of this step uses: what vLLM counts to choose a graph, and loads."""
        return {self.lora_requests[i] for i in req_ids if self.active.get(i, 0) and i in self.lora_requests}
