"""Model runner V2's table of each request's adapter: in arrays, and under the boundary rule."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.v1.worker.gpu.lora_utils import LoraState

NO_BOUNDARY = 1 << 62


class ArrayLoraState(LoraState):
    """vLLM's table of each request's adapter, answering in arrays where stock makes a Python object of every token."""

    def make_lora_inputs(
        self, req_ids: list[str], idx_mapping: NDArray[np.int32], num_scheduled_tokens: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], set[Any]]:
        """The adapter ids of the step's rows and of its tokens, and the requests' adapters."""
        ids = self.lora_ids[idx_mapping]
        return ids, ids.repeat(num_scheduled_tokens), self.get_activate_loras(req_ids)


class ReleasableLoraState(ArrayLoraState):
    """The same under the boundary rule: a token keeps its adapter if its position is below its request's boundary.

    Attributes:
        boundaries: int64 [max_num_reqs], by a request's place in vLLM's table; NO_BOUNDARY while it keeps its adapter.
        shadows: rows of the step's batch that have no adapter whatever their request has (shadow.py).
    """

    def __init__(self, max_num_reqs: int) -> None:
        super().__init__(max_num_reqs)
        self.boundaries = np.full(max_num_reqs, NO_BOUNDARY, np.int64)
        self.shadows = range(0)
        self._kept = np.zeros(max_num_reqs, np.int64)
        self._step: set[Any] = set()

    def add_request(self, req_id: str, req_index: int, lora_request: Any) -> None:
        """A new request, or one that comes back, in a place of the table."""
        super().add_request(req_id, req_index, lora_request)
        self.boundaries[req_index] = NO_BOUNDARY

    def plan(
        self,
        req_ids: list[str],
        places: NDArray[np.int64],
        counts: NDArray[np.int64],
        computed: NDArray[np.integer[Any]],
    ) -> NDArray[np.int64]:
        """Work out a step: how many of each request's tokens keep their adapter [n]; 0 where there is none.

        Args:
            places: each request's place in the table [n]. counts: its tokens in this step [n].
            computed: the position of the first of them [n].
        """
        ids = self.lora_ids[places]
        kept = np.where(ids > 0, np.clip(self.boundaries[places] - computed, 0, counts), 0)
        self._kept[places] = kept
        active = np.flatnonzero(kept)
        firsts = active[np.unique(ids[active], return_index=True)[1]]
        self._step = {self.lora_requests[req_ids[k]] for k in firsts}
        return kept

    def make_lora_inputs(
        self, req_ids: list[str], idx_mapping: NDArray[np.int32], num_scheduled_tokens: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], set[Any]]:
        """As stock's, with 0 for the tokens (and for the rows whose last token is one) at or past a boundary."""
        ids, kept = self.lora_ids[idx_mapping], self._kept[idx_mapping]
        kept[self.shadows.start : self.shadows.stop] = 0
        lengths = np.stack([kept, num_scheduled_tokens - kept], axis=1).ravel()
        tokens = np.stack([ids, np.zeros_like(ids)], axis=1).ravel().repeat(lengths)
        return np.where(kept == num_scheduled_tokens, ids, 0), tokens, self._step

    def get_activate_loras(self, req_ids: list[str]) -> set[Any]:
        """The adapters that some token of the planned step uses: what vLLM counts to choose a graph, and loads."""
        return self._step
