"""The probe: the base's next-token logits over a request's own KV cache, in the step that also runs its adapter.

Which base logits these are, exactly: those of the base model with no LoRA anywhere, at position p of a decode row,
whose attention sees the adapter's keys and values at positions below p and the base's own at p. That is what the row
would compute in this step if it had been released with boundary p. The base pass runs first and writes its keys and
values to the cache at p; the adapter's pass over the same rows then overwrites them, so the request is not changed.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata


def base_logits(runner: Any, rows: list[int], tokens: list[int], input_ids: Any, positions: Any) -> torch.Tensor:
    """Base logits [k, V] in the model's dtype for k decode rows of the batch.

    Call inside the step's forward context, with the LoRA mapping already switched off.

    Args:
        runner: vLLM's model runner V1.
        rows: batch rows [k], each with one token in this step.
        tokens: the index of each row's token in the step's flat token tensors [k].
    """
    device = positions.device
    row_index = torch.tensor(rows, device=device)
    token_index = torch.tensor(tokens, device=device)
    live = get_forward_context()
    slots = {layer: slot[token_index] for layer, slot in live.slot_mapping.items()}
    common = _metadata(runner, row_index, next(iter(slots.values())))
    metadata = {
        layer: builder.build(0, common)
        for builder, group in zip(_builders(runner), runner.attn_groups[0], strict=True)
        for layer in group.layer_names
    }
    # No graph mode is named, so the pass runs outside CUDA graphs, whatever the step itself does.
    with set_forward_context(metadata, runner.vllm_config, num_tokens=len(rows), slot_mapping=slots):
        hidden = runner.model(input_ids=input_ids[token_index], positions=positions[token_index])
    return runner.model.compute_logits(hidden)  # type: ignore[no-any-return]


def _builders(runner: Any) -> list[Any]:
    """A metadata builder for each attention group, beside vLLM's own: those hold buffers that captured graphs read,
    which were filled for this step before the probe."""
    if not hasattr(runner, "lorazor_builders"):
        stock = [group.get_metadata_builder(0) for group in runner.attn_groups[0]]
        with set_current_vllm_config(runner.vllm_config):
            runner.lorazor_builders = [type(b)(b.kv_cache_spec, b.layer_names, b.vllm_config, b.device) for b in stock]
    builders: list[Any] = runner.lorazor_builders
    return builders


def _metadata(runner: Any, rows: torch.Tensor, slots: torch.Tensor) -> Any:
    """Attention metadata for one token of each row, cut from what the runner prepared for the whole batch."""
    k = len(rows)
    seq_lens = runner.seq_lens[rows]
    starts = torch.arange(k + 1, dtype=torch.int32)
    table = runner.input_batch.block_table[0].get_device_tensor(runner.input_batch.num_reqs)
    seq_lens_cpu = seq_lens.cpu()
    return CommonAttentionMetadata(
        query_start_loc=starts.to(seq_lens.device),
        query_start_loc_cpu=starts,
        seq_lens=seq_lens,
        _seq_lens_cpu=seq_lens_cpu,
        seq_lens_cpu_upper_bound=seq_lens_cpu,
        num_reqs=k,
        num_actual_tokens=k,
        max_query_len=1,
        max_seq_len=int(seq_lens_cpu.max()),
        block_table_tensor=table[rows],
        slot_mapping=slots,
        causal=True,
    )
