"""Compiles every kernel variant that a model's LoRA layers can ask for, before the server measures its memory.

Triton compiles at the first launch of a variant: seconds, in the middle of somebody's answer. A variant depends on a
layer's shapes and on the number of rows, not on the adapters, so launches over rows without one compile them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from vllm.lora.layers import LogitsProcessorWithLoRA, VocabParallelEmbeddingWithLoRA

from lorazor.runtime.active_loras import take_over
from lorazor.runtime.lora_op import ActiveRows, add_linear, expand_op, shrink_op
from lorazor.runtime.punica_gpu import KernelPunica
from lorazor.runtime.slot_layout import stacks_of
from lorazor.runtime.swaps import Swaps

Launch = Callable[[ActiveRows, int], None]


def take_over_and_warm_up(runner: Any) -> None:
    """Give a loaded model our LoRA wrappers, with their kernels compiled, and our way of swapping adapters."""
    manager = runner.lora_manager._adapter_manager
    take_over(manager)
    parallel = runner.vllm_config.parallel_config
    runner.swaps = Swaps(runner.lora_manager, parallel.tensor_parallel_size * parallel.data_parallel_size)
    if runner.swaps.nbytes:
        runner.model_memory_usage += runner.swaps.nbytes
    for wrapper in {id(w): w for w in manager.punica_wrapper_mapping.values()}.values():
        if isinstance(wrapper, KernelPunica):
            warm_up(wrapper)


def row_counts(most: int) -> list[int]:
    """Powers of two up to `most`, and one more than each: on both sides of every threshold, divisible by 16 and not."""
    powers = [1 << k for k in range(most.bit_length())]
    return sorted({rows for power in powers for rows in (power, power + 1) if rows <= most} | {most})


@torch.inference_mode()
def warm_up(wrapper: KernelPunica) -> None:
    """Launch each distinct layer of this wrapper at each row count, on inputs and a tile list of our own."""
    for active, launches in _work(wrapper):
        nobody = ActiveRows(active.tiles.max_rows, active.tiles.max_loras, active.ranks, active.full_rank)
        nobody.nobody = False  # launch all the same: the list is empty
        for rows in row_counts(active.tiles.max_rows):
            nobody.tiles.copy(np.full(rows, -1, np.int32))
            for launch in launches:
                launch(nobody, rows)
    if wrapper.tokens.ranks.is_cuda:
        torch.accelerator.synchronize()
        torch.accelerator.empty_cache()


def _work(wrapper: KernelPunica) -> Iterator[tuple[ActiveRows, list[Launch]]]:
    """The wrapper's two row lists, each with one launch for every distinct signature of its layers."""
    layers: dict[Any, Any] = {}
    for module in wrapper.manager.modules.values():
        if getattr(module, "punica_wrapper", None) is wrapper:
            a, b = stacks_of(module)
            head = isinstance(module, LogitsProcessorWithLoRA)
            layers.setdefault((head, a[0].ndim, *(w.shape for w in (*a, *b)), a[0].dtype), module)
    heads = [m for m in layers.values() if isinstance(m, LogitsProcessorWithLoRA)]
    others = [m for m in layers.values() if not isinstance(m, LogitsProcessorWithLoRA)]
    sharded = bool(wrapper.manager.lora_config.fully_sharded_loras)
    yield wrapper.tokens, [launch for module in others for launch in _launches(module, sharded)]
    yield wrapper.samples, [launch for module in heads for launch in _launches(module, False)]


def _launches(module: Any, sharded: bool) -> Iterator[Launch]:
    a, b = stacks_of(module)
    columns = sum(weight.shape[2] for weight in b)
    embedding = isinstance(module, VocabParallelEmbeddingWithLoRA)
    if not embedding and a[0].shape[2] == b[0].shape[3]:
        yield lambda rows, n: add_linear(rows, _room(n, columns, b), _room(n, a[0].shape[3], a), a, b)
    if sharded and not embedding:
        yield lambda rows, n: shrink_op(
            _room(len(a) * n, a[0].shape[2], a, torch.float32).view(len(a), n, -1),
            _room(n, a[0].shape[3], a),
            a,
            rows.key,
        )
    if sharded or embedding:
        yield lambda rows, n: expand_op(
            _room(n, columns, b), _room(len(b) * n, b[0].shape[3], b).view(len(b), n, -1), b, rows.key, 0, True
        )


def _room(rows: int, columns: int, like: list[torch.Tensor], dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty(rows, columns, dtype=dtype or like[0].dtype, device=like[0].device)
