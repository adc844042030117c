"""Scratch blocks: where a shadow row writes the keys and values of its position.

A shadow must attend to the base's own keys and values at the probed position, and the request's block holds the
adapter's there. So the block of that position is copied, in every layer, and the shadow's row of the block table and
its slot point at the copy. The blocks lie behind those that the scheduler gives out (shadow_room.py).
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_cache_interface import AttentionSpec

from lorazor.kernels.place_shadows import WORD, Layers, block_bytes, place_shadows


class Scratch:
    """The scratch blocks of a runner, one a shadow.

    Args:
        runner: model runner V2 with its KV cache.
        first_block: the first block, as the scheduler counts them, that is not the scheduler's.
    """

    def __init__(self, runner: Any, first_block: int) -> None:
        tables, step = runner.block_tables, runner.block_tables.blocks_per_kv_block[0]
        self.first_block, self.count = first_block, runner.kv_cache_config.num_blocks - first_block
        # In the attention kernel's blocks, of which one of the scheduler's may hold several.
        self._blocks = range(first_block * step, (first_block + self.count) * step, step)
        self._tables, self._row_tables = tables.block_tables[0].gpu, tables.input_block_tables[0]
        self._slots, self._block_tokens = tables.slot_mappings[0], tables.kernel_block_sizes[0]
        self._layers = Layers.of(runner.kv_caches)
        # Compiles, before the server takes requests; copies the null block.
        self.place(range(1), self._tables.new_zeros(1), self._slots.new_ones(1))

    def place(self, rows: range, requests: torch.Tensor, positions: torch.Tensor) -> None:
        """Point these rows of the step, of one token each, at scratch blocks.

        Args:
            rows: behind no longer ones, so that they are their tokens too.
            requests: the batch's `idx_mapping`, int32 [n].
            positions: the batch's, int64 [n tokens].
        """
        place_shadows(
            rows,
            self._blocks,
            requests,
            positions,
            self._tables,
            self._row_tables,
            self._slots,
            self._layers,
            self._block_tokens,
        )


def scratch_fits(runner: Any) -> bool:
    """Whether scratch blocks serve this runner's model: text only, one block table, whole blocks one after another.

    Elsewhere (sliding windows beside full attention, state-space layers) probes stay a pass over the whole batch.
    """
    groups = runner.kv_cache_config.kv_cache_groups
    if len(groups) != 1 or runner.use_dcp or runner.pcp_manager is not None or runner.supports_mm_inputs:
        return False
    spec = groups[0].kv_cache_spec
    by_layer = getattr(spec, "kv_cache_specs", {"all": spec})
    blocks = runner.kv_cache_config.num_blocks * runner.block_tables.blocks_per_kv_block[0]
    return all(isinstance(one, AttentionSpec) for one in by_layer.values()) and all(
        cache.shape[0] == blocks and cache.stride(0) == max(cache.stride()) and block_bytes(cache) % WORD == 0
        for cache in runner.kv_caches
    )
