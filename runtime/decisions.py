"""Model runner V2 after a forward pass: signals and scores start home with the tokens; once those are read, decisions.

Signals are taken on the device before the sampler, and ride home on vLLM's own copy stream with the tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker.gpu.async_utils import stream

from lorazor.runtime.core import ReleaseCore, Sampled
from lorazor.runtime.device_policy import DevicePolicy
from lorazor.runtime.overlap import Pending, ReleasingOutput
from lorazor.runtime.shadow import Probed
from lorazor.runtime.step_plan import StepPlan
from lorazor.runtime.step_signals import step_signals

logger = logging.getLogger("vllm.lorazor")


class Decisions:
    """For a model runner V2, which gives `_raw` and `_probed` of the step before it samples."""

    core: ReleaseCore
    device_policy: DevicePolicy | None
    max_num_reqs: int
    req_states: Any
    output_copy_stream: Any
    main_stream: Any
    _drop_shadows: Any
    _probed: Probed | None
    _raw: torch.Tensor | None = None
    _sampling = False
    _wanting: Sequence[int] = ()
    _pending: Pending | None = None
    _tell_of_signals = True

    def sample(self, hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
        """Sample, and start what the raw logits say on its way home."""
        self._raw, shadows = None, self._drop_shadows(input_batch)
        self._wanting = self.core.wanting(input_batch.req_ids) if self.core.decides else []
        self._sampling = shadows or bool(self._wanting)
        try:
            sampled = super().sample(hidden_states, input_batch, grammar_output)  # type: ignore[misc]
        finally:
            self._sampling = False
        if self.core.decides:
            self._pending = self._start_home(input_batch, sampled[0].sampled_token_ids)
        return sampled

    def _start_home(self, batch: Any, tokens: torch.Tensor) -> Pending:
        ids = list(batch.req_ids)
        prompt = self.req_states.prompt_len.np[batch.idx_mapping_np[: len(ids)]]
        steps = batch.num_computed_tokens_np[: len(ids)] + batch.num_scheduled_tokens[: len(ids)] - prompt
        probed, raw = set(self._probed.rows) if self._probed is not None else set(), self._raw
        pending = Pending(ids, steps.tolist(), probed, None)
        self._raw = None
        try:
            sent = self._outcome(pending, raw, tokens[:, 0])
            return replace(pending, home=self._home(sent), sent=sent)
        except Exception:
            self._tell("signals failed")
            return pending

    def _outcome(self, step: Pending, raw: torch.Tensor | None, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The step's scores where the policy is on the device, else its signals and probes; nothing if nobody asks."""
        policy = self.device_policy
        if raw is None:
            return ()
        listed, probed = self._wanting, self._probed
        wanted = set(listed)
        pairs = [pair for pair in probed.rows.values() if pair[0] in wanted] if probed else []
        windows = self.core.followed.windows(step.ids, step.steps) if policy and self.core.followed else None
        plan = StepPlan(listed, pairs, windows, self.max_num_reqs, raw.device)
        signals, probes = step_signals(raw, probed.logits if probed and pairs else None, tokens, plan)
        return (signals, probes) if policy is None else (policy.score(signals, probes, plan),)

    def _home(self, sent: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        if not sent or sent[0].device.type == "cpu":
            return sent
        with stream(self.output_copy_stream, self.main_stream):
            self.output_copy_stream.wait_stream(self.main_stream)
            return tuple(tensor.to("cpu", non_blocking=True) for tensor in sent)

    def _tell(self, what: str) -> None:
        if self._tell_of_signals:
            self._tell_of_signals = False
            logger.exception("LoRazor: %s; the requests of this step keep their adapters (logged once)", what)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """vLLM's output of the step, with our decisions on it when its tokens are read."""
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        pending, self._pending = self._pending, None
        if output is None or pending is None:
            return output

        def finish(read: Any) -> Any:
            with self.core.lock:
                return self._decide(read, pending)

        return ReleasingOutput(output, finish) if isinstance(output, AsyncModelRunnerOutput) else finish(output)

    def _decide(self, output: Any, pending: Pending) -> Any:
        try:
            if pending.home is None:
                self.core.give_up(pending.ids)
            else:
                self._observe(output.sampled_token_ids, pending, pending.home)
        except Exception:
            self._tell("decisions failed")
            self.core.give_up(pending.ids)
        output.lorazor = self.core.take_step()
        return output

    def _observe(self, sampled: list[list[int]], pending: Pending, home: tuple[torch.Tensor, ...]) -> None:
        # A step whose output vLLM dropped (preempted meanwhile) is made again and counts once.
        rows = [k for k in self.core.unobserved(pending.ids, pending.steps) if sampled[k]]
        ids, steps = [pending.ids[k] for k in rows], [pending.steps[k] for k in rows]
        if len(home) == 2:
            signals, probes = home
            tokens = torch.tensor([sampled[k][0] for k in rows], dtype=torch.long)
            self.core.observe(Sampled(ids, steps, tokens, signals[rows], probes[rows]))
            return
        scores = home[0].tolist() if home else []
        known = {pending.ids[k]: scores[k] for k in rows if scores and pending.ids[k] in pending.probed}
        self.core.observe_scores(ids, steps, known)
