"""Unloading an adapter waits for the live requests that need it: its files may be gone by the next step."""

from __future__ import annotations

from typing import Any


class Unloading:
    """For a model runner, which says with `_in_use` what is needed, and calls `_unload_idle` in every step."""

    _leaving: set[int]
    remove_lora: Any

    def _in_use(self) -> set[int]:
        """Adapters of live requests; a released one counts, as it needs its adapter again if it is preempted."""
        raise NotImplementedError

    def _unload_idle(self) -> None:
        for lora_id in self._leaving - self._in_use() if self._leaving else ():
            self._leaving.discard(lora_id)
            self.remove_lora(lora_id)

    def remove_when_idle(self, lora_id: int) -> bool:
        """Unload an adapter, at once or when its last live request ends."""
        if lora_id in self._in_use():
            self._leaving.add(lora_id)
            return True
        return bool(self.remove_lora(lora_id))

    def keep_loaded(self, lora_id: int) -> None:
        """Forget a pending unload: the adapter was loaded again."""
        self._leaving.discard(lora_id)
