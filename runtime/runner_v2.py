"""Model runner V2 with releases.

Steps overlap: step k + 1 is launched before the tokens of step k are read. A decision made on step k (c output tokens
before it) sets the boundary to prompt length + c + 1, which step k + 2 is the first to reach, so the host's lag changes
no text. Signals are taken on the device, of the logits before the sampler; there the policy scores them, and the scores
(or, where nothing on the device asks, the signals) ride home on vLLM's own copy stream with the tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from vllm.platforms import current_platform

from lorazor.runtime.active_loras import ActiveLoras
from lorazor.runtime.core import ReleaseCore
from lorazor.runtime.core_values import Admitted
from lorazor.runtime.decisions import Decisions
from lorazor.runtime.device_policy import DevicePolicy
from lorazor.runtime.device_step import DeviceStep, start_device_policy
from lorazor.runtime.lora_state import ReleasableLoraState
from lorazor.runtime.ranks import agree_on_admissions, take_in_decisions
from lorazor.runtime.shadow import Probed, ShadowRows
from lorazor.runtime.unloading import Unloading

if current_platform.is_cpu():
    from vllm.v1.worker.cpu.model_runner import CPUModelRunner as StockRunner
else:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as StockRunner

logger = logging.getLogger("vllm.lorazor")


class ReleaseRunner(Decisions, Unloading, ShadowRows, ActiveLoras, StockRunner):
    """Given to the built runner as its class by the worker, which then calls `start_lorazor`."""

    core: ReleaseCore

    def start_lorazor(self, core: ReleaseCore, fingerprints: Callable[[str], str | None]) -> None:
        """Attach the core; `fingerprints(path)` names an adapter by its weights."""
        self.core, self.fingerprints = core, fingerprints
        self.lora_state: Any = ReleasableLoraState(self.max_num_reqs)
        self._mapping: tuple[Any, ...] = ()
        self._to_probe: set[str] = set()
        self._probed: Probed | None = None
        self._probes_work = True
        self._leaving: set[int] = set()
        self._adapters: dict[str, int] = {}
        self.device_step: DeviceStep | None = None
        self.device_policy: DevicePolicy | None = None
        if core.decides and (core.followed is not None or core.config.record):
            self._start_device_step()
        self._listen()

    def _start_device_step(self) -> None:
        """Before vLLM measures the memory: what it does not see in its own trial it must be told."""
        config = self.model_config
        logits = torch.zeros(1, config.get_vocab_size(), dtype=config.head_dtype, device=self.device)
        self.device_step = DeviceStep(self.max_num_reqs, logits, self.core.probes)
        self.model_memory_usage += self.device_step.nbytes
        self.device_policy = start_device_policy(self.core, self.device_step)

    def _listen(self) -> None:
        """See the logits before grammar and sampler write into them, and every forward pass before it runs."""
        compute_logits, forward = self.model.compute_logits, self.model.forward

        def seen(*args: Any, **kwargs: Any) -> Any:
            logits = compute_logits(*args, **kwargs)
            if self._sampling:
                self._keep(logits)
                logits, probed = self._take_base(logits)
                self._probed = probed or self._probed
            return logits

        self.model.compute_logits = seen
        self.model.forward = lambda *args, **kwargs: self._with_probes(lambda: forward(*args, **kwargs))

    def capture_model(self, *args: Any, **kwargs: Any) -> Any:
        """Capture the graphs; a full one runs without the model's own forward, so it is listened to as well."""
        result = super().capture_model(*args, **kwargs)
        if self.cudagraph_manager is not None:
            replay = self.cudagraph_manager.run_fullgraph
            self.cudagraph_manager.run_fullgraph = lambda desc: self._with_probes(lambda: replay(desc))
        return result

    # ------------------------------------------------------------------ before the forward pass
    def add_requests(self, scheduler_output: Any) -> None:
        """Take in new requests; one with an adapter is followed from here on, also when it comes back resumed."""
        super().add_requests(scheduler_output)
        with_adapter = [new for new in scheduler_output.scheduled_new_reqs if new.lora_request is not None]
        self._adapters |= {new.req_id: new.lora_request.lora_int_id for new in with_adapter}
        with self.core.lock:
            fresh = [new for new in with_adapter if not self.core.is_live(new.req_id)]
            if fresh:
                self.core.admit(*map(self._admitted, fresh))
                agree_on_admissions(self.core, [new.req_id for new in fresh])
            self._take_boundaries(new.req_id for new in with_adapter)

    def _admitted(self, new: Any) -> Admitted:
        return Admitted(
            new.req_id,
            adapter=new.lora_request.lora_name,
            fingerprint=self.fingerprints(new.lora_request.lora_path),
            prompt_tokens=len(new.prompt_token_ids),
            max_tokens=new.sampling_params.max_tokens,
            extra_args=new.sampling_params.extra_args,
        )

    def finish_requests(self, scheduler_output: Any) -> None:
        """Forget requests that ended; preempted ones are remembered."""
        super().finish_requests(scheduler_output)
        with self.core.lock:
            for request_id in scheduler_output.finished_req_ids:
                self.core.forget(request_id)
                self._adapters.pop(request_id, None)
        self._unload_idle()

    def _in_use(self) -> set[int]:
        return set(self._adapters.values())

    def update_requests(self, scheduler_output: Any) -> None:
        """Take in the step's positions, and from them which tokens keep their adapter: position < boundary."""
        super().update_requests(scheduler_output)
        self.look_ahead(scheduler_output)
        with self.core.lock:
            self._take_boundaries(take_in_decisions(self.core, scheduler_output))
            self._map(scheduler_output)

    def _take_boundaries(self, released: Iterable[str]) -> None:
        for request_id in released:
            place = self.req_states.req_id_to_index.get(request_id)
            boundary = self.core.boundary(request_id) if self.core.is_live(request_id) else None
            if place is not None and boundary is not None:
                self.lora_state.boundaries[place] = boundary

    def _map(self, scheduler_output: Any) -> None:
        table, scheduled = self.req_states, scheduler_output.num_scheduled_tokens
        ids, n = list(scheduled), len(scheduled)
        places = np.fromiter((table.req_id_to_index[i] for i in ids), np.int64, n)
        counts = np.fromiter(scheduled.values(), np.int64, n)
        computed = table.num_computed_tokens_np[places]
        kept = self.lora_state.plan(ids, places, counts, computed)
        steps = computed + 1 - table.prompt_len.np[places]
        one_token = np.flatnonzero((counts == 1) & (kept == 1) & self.core.may_decide(steps))
        self._plan_probes(scheduler_output, {ids[k] for k in one_token if self.core.wants_probe(ids[k], int(steps[k]))})
        self.core.counters.add("lorazor_active_rows", int((kept > 0).sum()))
        self.core.counters.add("lorazor_rows", int((self.lora_state.lora_ids[places] > 0).sum()))

    def _plan_probes(self, scheduler_output: Any, due: set[str]) -> None:
        self._to_probe, self._probed = due, None
        if due and self._add_shadows(scheduler_output, due):
            self.core.counters.add("lorazor_probes_total", len(due))
            self._to_probe = set()

    def _set_active_loras(self, rows: Any, tokens: Any, requests: set[Any], *args: Any) -> None:
        self._mapping = rows, tokens, requests, *args
        super()._set_active_loras(rows, tokens, requests, *args)

    def _with_probes(self, run: Callable[[], Any]) -> Any:
        """The base's pass over the whole batch first, if rows of it are to be probed that got no shadow; the step's own
        pass overwrites the keys and values that it leaves."""
        probed, self._to_probe = self._to_probe, set()
        if probed and self._probes_work:
            mapping = self._mapping
            try:
                super()._set_active_loras(np.zeros_like(mapping[0]), np.zeros_like(mapping[1]), set())
                rows = {i: (k, k) for k, i in enumerate(self._batch.req_ids) if i in probed}
                self._probed = Probed(self._base_logits(run), rows)
            except Exception:
                self._probing_failed(len(probed))
            finally:
                super()._set_active_loras(*mapping)
            self.core.counters.add("lorazor_probes_total", len(probed))
        return run()

    def _probing_failed(self, count: int) -> None:
        self._probes_work = False
        self.core.counters.add_failures("probe", count)
        logger.exception("LoRazor: probing failed and is switched off; requests keep their adapters")

    def _base_logits(self, run: Callable[[], Any]) -> torch.Tensor:
        # Before the step's own pass: a full graph leaves both in the same memory.
        logits: torch.Tensor = self.model.compute_logits(run()[self._batch.logits_indices])
        return logits
