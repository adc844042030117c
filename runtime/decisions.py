"""Model runner V2 after a forward pass: signals and scores start home with the tokens; once those are read, decisions.

The logits are kept before the sampler; what they say is worked out on the device behind it, and comes home before
vLLM's own copies of the step do.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.outputs import AsyncModelRunnerOutput

from lorazor.runtime.core import ReleaseCore
from lorazor.runtime.core_values import Sampled
from lorazor.runtime.device_policy import DevicePolicy
from lorazor.runtime.device_step import DeviceStep
from lorazor.runtime.overlap import Pending, ReleasingOutput
from lorazor.runtime.shadow import Probed
from lorazor.runtime.step_plan import StepPlan

logger = logging.getLogger("vllm.lorazor")


class Decisions:
    """For a model runner V2, which calls `_keep` and gives `_probed` of the step before it samples.

    Attributes:
        device_step: None where nobody asks what logits say.
        device_policy: None where the host scores.
    """

    core: ReleaseCore
    device_step: DeviceStep | None
    device_policy: DevicePolicy | None
    req_states: Any
    _drop_shadows: Any
    _probed: Probed | None
    _kept = 0
    _sampling = False
    _wanted: NDArray[np.bool_] | None = None
    _pending: Pending | None = None
    _tell_of_signals = True

    def sample(self, hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
        """Sample, and start what the raw logits say on its way home."""
        shadows, ids, core = self._drop_shadows(input_batch), input_batch.req_ids, self.core
        self._kept, self._wanted, places = 0, None, np.zeros(0, np.int32)
        if core.decides and self.device_step is not None:
            places = np.full(len(ids), -1, np.int32) if core.followed is None else core.followed.places(ids)
            self._wanted = core.wanting(ids, places)
        self._sampling = shadows or (self._wanted is not None and bool(self._wanted.any()))
        try:
            sampled = super().sample(hidden_states, input_batch, grammar_output)  # type: ignore[misc]
        finally:
            self._sampling = False
        if self.core.decides:
            self._pending = self._start_home(input_batch, places, sampled[0].sampled_token_ids)
        return sampled

    def _keep(self, logits: torch.Tensor) -> None:
        """Keep the step's logits, of which signals are wanted."""
        if self._wanted is not None and self.device_step is not None and self._wanted.any():
            try:
                self._kept = self.device_step.keep(logits)
            except Exception:
                self._tell("signals failed")

    def _start_home(self, batch: Any, places: NDArray[np.int32], tokens: torch.Tensor) -> Pending:
        ids = list(batch.req_ids)
        prompt = self.req_states.prompt_len.np[batch.idx_mapping_np[: len(ids)]]
        steps = batch.num_computed_tokens_np[: len(ids)] + batch.num_scheduled_tokens[: len(ids)] - prompt
        pending = Pending(ids, steps, self._due(ids, places, steps), None)
        try:
            return replace(pending, home=self._outcome(places, steps, tokens[:, 0]))
        except Exception:
            self._tell("signals failed")
            return pending

    def _due(self, ids: list[str], places: NDArray[np.int32], steps: NDArray[np.integer[Any]]) -> dict[str, int]:
        if not self.core.probes:
            return {ids[k]: int(k) for k in np.flatnonzero((places >= 0) & self.core.may_decide(steps))}
        return {i: row for i, (row, _) in self._probed.rows.items()} if self._probed is not None else {}

    def _outcome(
        self, places: NDArray[np.int32], steps: NDArray[np.integer[Any]], tokens: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """The step's scores where the policy is on the device, else its signals and probes; nothing if nobody asks."""
        wanted, probed, policy, followed = self._wanted, self._probed, self.device_policy, self.core.followed
        if self.device_step is None or wanted is None or not self._kept:
            return ()
        pairs = [pair for pair in probed.rows.values() if wanted[pair[0]]] if probed else []
        windows = followed.windows(places, steps) if policy is not None and followed is not None else None
        plan = StepPlan(np.flatnonzero(wanted), pairs, windows)
        return self.device_step.run(self._kept, tokens, plan, probed.logits if probed and pairs else None, policy)

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
        made = np.fromiter(map(len, sampled), np.int64, len(sampled)) > 0
        rows = np.flatnonzero(made & self.core.reports.uncounted(pending.ids, pending.steps))
        ids, steps = [pending.ids[k] for k in rows], pending.steps[rows]
        if len(home) == 2:
            signals, probes = (found[rows] for found in home)
            tokens = torch.tensor([sampled[k][0] for k in rows], dtype=torch.long)
            self.core.observe(Sampled(ids, steps, tokens, signals, probes))
            return
        scores = home[0].numpy() if home else ()
        self.core.observe_scores(ids, steps, {i: float(scores[row]) for i, row in pending.due.items() if home})
