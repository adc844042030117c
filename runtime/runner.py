"""Model runner V1 with releases: adapters by position, probes, decisions.

The batch tables that vLLM keeps are never edited. Each step maps every token by the boundary rule anew, so condensing,
preempting and resuming need no care.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
import torch
from vllm.platforms import current_platform

from lorazor.features.signals import ADAPTER_SIGNALS, PROBE_SIGNALS, adapter_signals, probe_signals
from lorazor.runtime.active_loras import ActiveLoras
from lorazor.runtime.core import ReleaseCore
from lorazor.runtime.core_values import Admitted, Sampled
from lorazor.runtime.mapping import map_tokens
from lorazor.runtime.probe import base_logits
from lorazor.runtime.ranks import agree_on_admissions, take_in_decisions
from lorazor.runtime.unloading import Unloading

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner as StockRunner
else:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as StockRunner

logger = logging.getLogger("vllm.lorazor")


class LoRazorRunner(Unloading, ActiveLoras, StockRunner):
    """Given to the built runner as its class by the worker, which then calls `start_lorazor`."""

    core: ReleaseCore
    fingerprints: Any

    def start_lorazor(self, core: ReleaseCore, fingerprints: Any) -> None:
        """Attach the core; `fingerprints(path) -> str | None` names an adapter by its weights."""
        self.core, self.fingerprints = core, fingerprints
        self._mapping: tuple[Any, ...] = ()
        self._to_probe: list[tuple[int, int]] = []
        self._probed: tuple[list[int], torch.Tensor] | None = None
        self._probes_work = True
        self._told_of_signals = False
        self._leaving: set[int] = set()

    # ------------------------------------------------------------------ before the forward pass
    def set_active_loras(
        self, input_batch: Any, num_scheduled_tokens: Any, num_sampled_tokens: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        """Map each token by the boundary rule: position < boundary keeps the adapter."""
        ids = input_batch.req_ids[: input_batch.num_reqs]
        counts = np.asarray(num_scheduled_tokens[: len(ids)], np.int64)
        start = input_batch.num_computed_tokens_cpu[: len(ids)].astype(np.int64)
        adapters = input_batch.request_lora_mapping[: len(ids)].astype(np.int64)
        self._admit(ids)
        mapping = map_tokens(adapters, [self.core.boundary(i) for i in ids], start, counts)
        requests = {input_batch.lora_id_to_lora_request[a] for a in set(adapters[mapping.active > 0].tolist())}
        self._mapping = (mapping.per_row, mapping.per_token, requests, *args)
        self._set_active_loras(*self._mapping, **kwargs)
        self._plan_probes(ids, start, counts)
        self.core.counters.add("lorazor_active_rows", int((mapping.active > 0).sum()))
        self.core.counters.add("lorazor_rows", int((adapters > 0).sum()))

    def _admit(self, ids: list[str]) -> None:
        fresh = [i for i in ids if self.requests[i].lora_request is not None and not self.core.is_live(i)]
        if fresh:
            self.core.admit(*map(self._admitted, fresh))
            agree_on_admissions(self.core, fresh)

    def _admitted(self, request_id: str) -> Admitted:
        state = self.requests[request_id]
        return Admitted(
            request_id,
            adapter=state.lora_request.lora_name,
            fingerprint=self.fingerprints(state.lora_request.lora_path),
            prompt_tokens=state.num_prompt_tokens,
            max_tokens=state.sampling_params.max_tokens,
            extra_args=state.sampling_params.extra_args,
        )

    def _plan_probes(self, ids: list[str], start: Any, counts: Any) -> None:
        """Which rows to probe: decode rows with one token, still active, at a decision step."""
        token = np.cumsum(counts) - counts
        self._probed = None
        self._to_probe = [
            (row, int(token[row]))
            for row, request_id in enumerate(ids)
            if self._probes_work
            and counts[row] == 1
            and self.core.wants_probe(request_id, int(start[row]) + 1 - self.requests[request_id].num_prompt_tokens)
        ]

    def _model_forward(self, input_ids: Any = None, positions: Any = None, *args: Any, **kwargs: Any) -> Any:
        """The base pass over probed rows first, then the step's own pass, which overwrites the probes' K and V."""
        if self._to_probe:
            plan, self._to_probe = self._to_probe, []
            self._probe(plan, input_ids, positions)
        return super()._model_forward(input_ids, positions, *args, **kwargs)

    def _probe(self, plan: list[tuple[int, int]], input_ids: Any, positions: Any) -> None:
        rows, tokens = [r for r, _ in plan], [t for _, t in plan]
        began = time.perf_counter()
        nobody = np.zeros(len(plan), np.int64)
        try:
            self._set_active_loras(nobody, nobody, set())
            self._probed = rows, base_logits(self, rows, tokens, input_ids, positions)
        except Exception:
            self._probes_work = False
            self.core.counters.add_failures("probe", len(rows))
            logger.exception("LoRazor: probing failed and is switched off; requests keep their adapters")
        finally:
            self._set_active_loras(*self._mapping)
        self.core.counters.add("lorazor_probes_total", len(rows))
        self.core.counters.add("lorazor_probe_microseconds_total", int(1e6 * (time.perf_counter() - began)))

    # ------------------------------------------------------------------ after it
    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample, then take the signals of the raw logits and let the core decide."""
        state = self.execute_model_state
        if state is None or not self.core.decides:
            return super().sample_tokens(grammar_output)
        ids = list(self.input_batch.req_ids)
        keep = [k for k, i in enumerate(ids) if self.core.wants_signals(i) and not self.discard_request_mask.np[k]]
        # Grammar masks and penalties write into the logits, so the rows that matter are copied first.
        raw = state.logits[keep].float()
        output = super().sample_tokens(grammar_output)
        try:
            self._observe(ids, keep, raw, output)
        except Exception:
            if not self._told_of_signals:
                self._told_of_signals = True
                logger.exception("LoRazor: signals failed; the requests of this step keep their adapters (logged once)")
            self.core.give_up(ids)
        output.lorazor = self.core.take_step()
        return output

    def _observe(self, ids: list[str], keep: list[int], raw: torch.Tensor, output: Any) -> None:
        rows = [k for k, tokens in enumerate(output.sampled_token_ids) if tokens and self.core.is_live(ids[k])]
        tokens = torch.tensor([output.sampled_token_ids[k][0] for k in rows])
        place = {k: j for j, k in enumerate(rows)}
        signals = torch.full((len(rows), len(ADAPTER_SIGNALS)), torch.nan)
        probes = torch.full((len(rows), len(PROBE_SIGNALS)), torch.nan)
        chosen = torch.tensor([output.sampled_token_ids[k][0] for k in keep], device=raw.device, dtype=torch.long)
        if keep:
            signals[[place[k] for k in keep]] = adapter_signals(raw, chosen).cpu()
        if self._probed is not None:
            probed, base = self._probed
            at = [keep.index(k) for k in probed]
            probes[[place[k] for k in probed]] = probe_signals(raw[at], base, chosen[at]).cpu()
        steps = np.array([len(self.requests[ids[k]].output_token_ids) - 1 for k in rows], np.int64)
        self.core.observe(Sampled([ids[k] for k in rows], steps, tokens, signals, probes))

    def _update_states(self, scheduler_output: Any) -> Any:
        result = super()._update_states(scheduler_output)
        for request_id in scheduler_output.finished_req_ids:
            self.core.forget(request_id)
        take_in_decisions(self.core, scheduler_output)
        self.look_ahead(scheduler_output)
        self._unload_idle()
        return result

    def _in_use(self) -> set[int]:
        return {state.lora_request.lora_int_id for state in self.requests.values() if state.lora_request}
