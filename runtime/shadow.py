"""Shadow rows: a probed decode row gets a second row in the same forward pass, without the adapter.

Model runner V2 finds everything of a row through its request's index, so a row more with the same index has the same
input token, position and past. Three things make it the base's: no adapter, a scratch block for its own keys and
values (scratch.py), and that it is gone from the batch before anything is sampled.

    rows before   a b c | b' | d d d d       a, b, c decode, b is probed, d is a prefill
    logits        a b c d | b'               shadows last, so that the rest is one piece
    rows after    a b c | d d d d
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lorazor.runtime.scratch import Scratch, scratch_fits

SHADOW = "\0shadow"
PAD_SLOT = -1  # vLLM's: keys and values of this token are written nowhere


@dataclass(frozen=True)
class Probed:
    """What a step's probes have found.

    Attributes:
        logits: the base's, float32 [m, V].
        rows: request id -> its row of the batch and of `logits`.
    """

    logits: torch.Tensor
    rows: dict[str, tuple[int, int]]


class ShadowRows:
    """For model runner V2: `_add_shadows` before a step's inputs are prepared, `_drop_shadows` before it samples."""

    _scratch: Scratch | None = None
    _batch: Any = None
    _shadows: tuple[str, ...] = ()
    _first_shadow = 0
    _in_place = False

    def use_scratch(self, first_block: int) -> None:
        """Take the KV cache's blocks from `first_block` on for shadows, if they serve this model."""
        if scratch_fits(self):
            self._scratch = Scratch(self, first_block)

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
        return self._batch

    def prepare_attn(self, input_batch: Any) -> Any:
        """Block tables and slots, the shadows' at their scratch blocks."""
        tables, slots = super().prepare_attn(input_batch)  # type: ignore[misc]
        if self._shadows and self._scratch is not None:
            rows = range(self._first_shadow, self._first_shadow + len(self._shadows))
            try:
                self._scratch.place(rows, input_batch.idx_mapping, input_batch.positions)
                self._in_place = True
            except Exception:
                slots[:, rows.start : rows.stop].fill_(PAD_SLOT)
                self._probing_failed(len(rows))
        return tables, slots

    def _probing_failed(self, count: int) -> None:
        raise NotImplementedError

    def _set_active_loras(self, rows: Any, tokens: Any, requests: set[Any], *args: Any) -> None:
        """Map rows in the order of their logits."""
        super()._set_active_loras(self._shadows_last(rows), tokens, requests, *args)  # type: ignore[misc]

    def _shadows_last(self, rows: Any) -> Any:
        first, last = self._first_shadow, self._first_shadow + len(self._shadows)
        if first == last or last == len(rows):
            return rows
        return _joined(_joined(rows[:first], rows[last:]), rows[first:last])

    def _drop_shadows(self, batch: Any) -> bool:
        """Trim the batch in place to the requests' own rows: a row twice would move its request on twice.

        Tokens stay as they are, and `logits_indices` has the shadows, last, until the logits are there.
        """
        if not self._shadows:
            return False
        n, first, count = batch.num_reqs, self._first_shadow, len(self._shadows)

        def own(values: Any, lead: int = 0) -> Any:
            tail = values[first + count + lead : n + lead]
            return _joined(values[: first + lead], tail - count if lead else tail)

        batch.logits_indices = self._shadows_last(batch.logits_indices)
        batch.req_ids = batch.req_ids[:first] + batch.req_ids[first + count :]
        batch.num_reqs = batch.num_reqs_after_padding = n - count
        for name in PER_ROW:
            setattr(batch, name, own(getattr(batch, name)))
        batch.expanded_idx_mapping = batch.idx_mapping
        batch.query_start_loc = own(batch.query_start_loc, 1)
        batch.query_start_loc_np = own(batch.query_start_loc_np, 1)
        batch.expanded_local_pos = batch.expanded_local_pos[: n - count]
        batch.cu_num_logits = batch.cu_num_logits[: n - count + 1]
        batch.cu_num_logits_np = batch.cu_num_logits_np[: n - count + 1]
        return True

    def _take_base(self, logits: torch.Tensor) -> tuple[torch.Tensor, Probed | None]:
        """The logits of the requests' own rows, and what the shadows' are."""
        shadows, self._shadows = self._shadows, ()
        if not shadows:
            return logits, None
        n, place = self._batch.num_reqs, {i: k for k, i in enumerate(self._batch.req_ids)}
        self._batch.logits_indices = self._batch.logits_indices[:n]
        rows = {i: (place[i], k) for k, i in enumerate(shadows)}
        return logits[:n], Probed(logits[n:].float(), rows) if self._in_place else None


# Of vLLM's InputBatch: one value a row.
PER_ROW = (
    "idx_mapping",
    "idx_mapping_np",
    "num_scheduled_tokens",
    "seq_lens",
    "num_computed_tokens_np",
    "prefill_len_np",
    "num_computed_prefill_tokens_np",
    "is_prefilling_np",
)


def _joined(head: Any, tail: Any) -> Any:
    """Both, one after the other: arrays or tensors; `head` itself, uncopied, where nothing follows."""
    if not len(tail):
        return head
    return torch.cat([head, tail]) if isinstance(head, torch.Tensor) else np.concatenate([head, tail])
