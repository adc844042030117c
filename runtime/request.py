"""A scheduler request that shows its adapter only where a token can still use it.

vLLM's scheduler reads `request.lora_request` for adapter slots, for admission and for the identity of cached blocks.
Past its boundary a request needs no slot, and its blocks are neither the adapter's nor the base's.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.v1.request import Request


class ReleasableRequest(Request):
    """A request with an adapter; `adopt` gives this class to one that vLLM built."""

    boundary: int | None = None
    release_step: int | None = None
    arm: str | None = None
    _hashing_to: int | None = None

    @property
    def lora_request(self) -> Any:
        """The adapter while a token below the boundary is still to be computed, else None.

        A preempted request starts again at token 0, so it asks for its adapter again. While blocks are hashed, the
        answer is the identity of the block's keys and values instead.
        """
        adapter = self.__dict__["lora_request"]
        if self.boundary is None:
            return adapter
        if self._hashing_to is not None:
            return adapter if self._hashing_to <= self.boundary else self._released_identity(adapter)
        return adapter if self.num_computed_tokens < self.boundary else None

    @lora_request.setter
    def lora_request(self, adapter: Any) -> None:
        self.__dict__["lora_request"] = adapter

    def _released_identity(self, adapter: Any) -> SimpleNamespace:
        # A NUL byte, so that no adapter name can equal it. Requests with the same boundary may share the block: its
        # keys and values are the same function of tokens, adapter and boundary.
        return SimpleNamespace(lora_name=f"{adapter.lora_name}\0released@{self.boundary}", lora_int_id=0)

    def report(self) -> dict[str, Any]:
        """What the client is told: the release step once it has taken effect, and the arm."""
        step = self.release_step
        took_effect = step is not None and self.num_output_tokens > step
        return {"release_step": step if took_effect else None, "arm": self.arm}


def adopt(request: Request, hash_block_size: int) -> None:
    """Make a request with an adapter releasable, in place; its prompt's blocks are hashed already, as the adapter's."""
    adapter = request.lora_request
    request.__class__ = ReleasableRequest
    request.lora_request = adapter
    hasher = request._block_hasher
    if hasher is None:
        return

    def hash_blocks(request: Any) -> Any:
        # One call covers at most one new block: a step appends one token.
        request._hashing_to = (len(request.block_hashes) + 1) * hash_block_size
        try:
            return hasher(request)
        finally:
            request._hashing_to = None

    request._block_hasher = hash_blocks
