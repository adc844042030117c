"""Shadow rows: a probed decode row gets a second row in the same forward pass, without the adapter.

Model runner V2 finds everything of a row through its request's index, so a row more with the same index has the same
input token, position and past. Three things make it the base's: no adapter, a scratch block for its own keys and
values (scratch.py), and that it is gone from the batch before anything is sampled.

    rows before   a b c | b' | d d d d       a, b, c decode, b is probed, d is a prefill
    logits        a b c d | b'               shadows last, so that the rest is one piece
    rows after    a b c | d d d d
"""

from __future__ import annotations

import logging
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch

from lorazor.runtime.batch_rows import drop_rows, rows_last
from lorazor.runtime.scratch import Scratch, scratch_fits

logger = logging.getLogger("vllm.lorazor")

SHADOW = "\0shadow"
PAD_SLOT = -1  # vLLM's: keys and values of this token are written nowhere


@dataclass(frozen=True)
class Probed:
    """What a step's probes have found.

    Attributes:
        logits: the base's, [m, V] in the model's dtype; None: they are rows of the step's own.
        rows: request id -> its row of the batch and of the base's logits.
    """

    logits: torch.Tensor | None
    rows: dict[str, tuple[int, int]]


class ShadowRows:
    """For model runner V2: `_add_shadows` before a step's inputs are prepared, `_drop_shadows` before it samples."""

    _scratch: Scratch | None = None
    _batch: Any = None
    _shadows: tuple[str, ...] = ()
    _first_shadow = 0
    _in_place = False
    _probes_work = True

    def use_scratch(self, first_block: int) -> None:
        """Take the KV cache's blocks from `first_block` on for shadows, if they serve this model."""
        if scratch_fits(self):
            self._scratch = Scratch(self, first_block)
        else:
            logger.info("LoRazor: on this model a probe is a pass over the whole batch")

    def post_kv_cache_wake_up(self) -> None:
        """After a sleep the KV cache may lie elsewhere."""
        super().post_kv_cache_wake_up()  # type: ignore[misc]
        if self._scratch is not None:
            self._scratch = Scratch(self, self._scratch.first_block)

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the step on a copy of its schedule, which may be given rows: the scheduler still reads its own."""
        if self._scratch is not None:
            scheduler_output = copy(scheduler_output)
            scheduler_output.num_scheduled_tokens = dict(scheduler_output.num_scheduled_tokens)
        return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def _add_shadows(self, schedule: Any, due: set[str]) -> bool:
        """Give each of these one-token rows a shadow; False if the step has no room for all of them.

        The scheduler leaves as many rows and tokens free as there are scratch blocks (shadow_room.py).
        """
        self._shadows, self._in_place = (), False
        if self._scratch is None or len(due) > self._scratch.count or self._returns_prompt(schedule):
            return False
        self._shadows = tuple(i for i in schedule.num_scheduled_tokens if i in due)
        schedule.num_scheduled_tokens.update({i + SHADOW: 1 for i in self._shadows})
        schedule.total_num_scheduled_tokens += len(self._shadows)
        return True

    def _returns_prompt(self, schedule: Any) -> bool:
        """Whether the step makes log-probabilities of a prompt: vLLM finds them by the place of every token."""
        states: Any = self.req_states  # type: ignore[attr-defined]
        asked = self.prompt_logprobs_worker.in_progress_prompt_logprobs  # type: ignore[attr-defined]
        rows = [states.req_id_to_index[i] for i in asked if i in schedule.num_scheduled_tokens]
        return any(states.num_computed_tokens_np[k] < states.prompt_len.np[k] for k in rows)

    def prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """Keep the batch, in its final order; shadows stand behind the other one-token rows and before longer ones."""
        index: dict[str, int] = self.req_states.req_id_to_index  # type: ignore[attr-defined]
        index.update({i + SHADOW: index[i] for i in self._shadows})
        try:
            self._batch = super().prepare_inputs(*args, **kwargs)  # type: ignore[misc]
        finally:
            for i in self._shadows:
                del index[i + SHADOW]
        if self._shadows:
            self._first_shadow = self._batch.req_ids.index(self._shadows[0] + SHADOW)
        self.lora_state.shadows = self._rows()  # type: ignore[attr-defined]
        return self._batch

    def prepare_attn(self, input_batch: Any) -> Any:
        """Block tables and slots, the shadows' at their scratch blocks."""
        tables, slots = super().prepare_attn(input_batch)  # type: ignore[misc]
        if self._shadows:
            self._in_place = self._place(input_batch)
            if not self._in_place:
                # A rank of several must not run fewer rows than the others, so the shadows stay and write nothing.
                slots[:, self._rows().start : self._rows().stop].fill_(PAD_SLOT)
        return tables, slots

    def _place(self, batch: Any) -> bool:
        if self._probes_work and self._scratch is not None:
            try:
                self._scratch.place(self._rows(), batch.idx_mapping, batch.positions)
                return True
            except Exception:
                self._probing_failed(len(self._shadows))  # type: ignore[attr-defined]
        return False

    def _set_active_loras(self, rows: Any, tokens: Any, requests: set[Any], *args: Any) -> None:
        """Map rows in the order of their logits."""
        super()._set_active_loras(rows_last(rows, self._rows()), tokens, requests, *args)  # type: ignore[misc]

    def _rows(self) -> range:
        """The shadows' rows, and tokens, of the step."""
        return range(self._first_shadow, self._first_shadow + len(self._shadows))

    def _drop_shadows(self, batch: Any) -> bool:
        """Leave the requests' own rows in the batch, before their logits are computed; whether there were others."""
        if self._shadows:
            drop_rows(batch, self._rows())
        return bool(self._shadows)

    def _take_base(self, logits: torch.Tensor) -> tuple[torch.Tensor, Probed | None]:
        """The logits of the requests' own rows, and where the shadows' were."""
        shadows, self._shadows = self._shadows, ()
        if not shadows:
            return logits, None
        n, place = self._batch.num_reqs, {i: k for k, i in enumerate(self._batch.req_ids)}
        self._batch.logits_indices = self._batch.logits_indices[:n]
        rows = {i: (place[i], n + k) for k, i in enumerate(shadows)}
        return logits[:n], Probed(None, rows) if self._in_place else None
