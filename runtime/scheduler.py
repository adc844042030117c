"""vLLM's scheduler with releases: a slot is free as soon as its last active row is gone, and no adapter starves.

A decision must be stamped on its request before vLLM handles the step's output, because that appends the token and
hashes the block that it fills.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from lorazor.features.grid import boundary
from lorazor.runtime.adapter_queue import AdapterQueue
from lorazor.runtime.core_values import StepReport
from lorazor.runtime.ids import public_id, sibling
from lorazor.runtime.request import ReleasableRequest, adopt
from lorazor.runtime.shadow_room import leave_room
from lorazor.runtime.slot_turns import Turn, in_turn, let_in, residents
from lorazor.runtime.step_news import StepNews, upcoming

# Requests of resident adapters are held back once another adapter has waited this long for a slot.
STARVATION_SECONDS = 2.0
KEPT_FAMILIES = 10_000


class LoRazorScheduler(Scheduler):
    """Adds releases to the stock scheduler; named by scheduler_cls."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        leave_room(self)
        self.waiting, self.skipped_waiting = AdapterQueue(self.policy), AdapterQueue(self.policy)
        self._let_in: set[int] | None = None
        self._counts: Counter[str] = Counter()
        self._released: dict[str, int] = {}
        self._given_up: list[str] = []
        self._families: OrderedDict[str, dict[int, dict[str, Any]]] = OrderedDict()
        self._hash_block_size: int = kwargs.get("hash_block_size") or self.block_size

    def add_request(self, request: Any) -> None:
        """Accept a request; one with an adapter becomes releasable."""
        if request.lora_request is not None and request.request_id not in self.requests:
            adopt(request, self._hash_block_size)
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """One step, in which vLLM sees only requests that may come in (see adapter_queue.py). It carries to every
        worker what was decided since the last one, and which adapters wait."""
        turns, ran = self._open(), len(self.running)
        try:
            step = super().schedule(*args, **kwargs)
        finally:
            self._show(None)
        step.lorazor = StepNews(self._released, self._given_up, upcoming(turns, self.running[ran:]))
        self._released, self._given_up = {}, []
        return step

    def _open(self) -> list[Turn]:
        """Show the step's requests; the adapters that wait for a slot, the next one first."""
        asking = self.skipped_waiting.turns() + self.waiting.turns()
        if not asking:
            return []
        slots = self.lora_config.max_loras
        resident = residents(self.running, slots)
        turns = in_turn(asking, resident)
        self._show(let_in(asking, turns, resident, slots, time.time() - STARVATION_SECONDS))
        return turns

    def _show(self, adapters: set[int] | None) -> None:
        self._let_in = adapters
        self.waiting.show(adapters)
        self.skipped_waiting.show(adapters)

    def _try_promote_blocked_waiting_request(self, request: Any) -> bool:
        """Whether vLLM may admit a request whose grammar, remote KV or input was awaited. Where its adapter may not
        come in, vLLM puts it back, and from then on it waits for a slot."""
        ready: bool = super()._try_promote_blocked_waiting_request(request)
        adapter = request.lora_request
        return ready and (self._let_in is None or adapter is None or adapter.lora_int_id in self._let_in)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Stamp new releases, let vLLM handle the step, and put each request's release step on its output."""
        step: StepReport | None = getattr(model_runner_output, "lorazor", None)
        if step is not None:
            self._stamp(step)
        touched = {i: self.requests.get(i) for i in scheduler_output.num_scheduled_tokens}
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for engine_outputs in outputs.values():
            for output in engine_outputs.outputs:
                request = touched.get(output.request_id)
                if isinstance(request, ReleasableRequest) and _may_be_last(output, request):
                    params = output.kv_transfer_params or {}
                    output.kv_transfer_params = {**params, "lorazor": self._report(request)}
        return outputs

    def _stamp(self, step: StepReport) -> None:
        self._counts.update(step.counts)
        self._released.update(step.released)
        self._given_up += step.given_up
        for request_id, arm in step.admitted.items():
            request = self.requests.get(request_id)
            if isinstance(request, ReleasableRequest):
                request.arm = arm
        for request_id, release in step.released.items():
            request = self.requests.get(request_id)
            if isinstance(request, ReleasableRequest):
                request.release_step = release
                request.boundary = boundary(request.num_prompt_tokens, release)

    def _report(self, request: ReleasableRequest) -> dict[str, Any]:
        report = request.report()
        index = sibling(request.request_id)
        if index is None:
            return report
        # vLLM passes on only the last sibling's parameters, so each carries those of all so far.
        family = self._families.setdefault(public_id(request.request_id), {})
        family[index] = report
        while len(self._families) > KEPT_FAMILIES:
            self._families.popitem(last=False)
        return {**report, "choices": [family.get(k) for k in range(max(family) + 1)]}

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's statistics, with our counter deltas in the one field that has room for them (see metrics.py)."""
        stats = super().make_stats(*args, **kwargs)
        if stats is not None and self._counts:
            stats.running_lora_adapters = {**stats.running_lora_adapters, **self._counts}
            self._counts.clear()
        return stats


def _may_be_last(output: Any, request: ReleasableRequest) -> bool:
    """Whether this output may end its request: a stop string is found by the API process, which asks no further."""
    return output.finish_reason is not None or bool(request.sampling_params.stop)


class LoRazorAsyncScheduler(LoRazorScheduler, AsyncScheduler):
    """The same where steps overlap: named by scheduler_cls under asynchronous scheduling."""
