"""The LoRA kernels as torch custom ops, which torch.compile takes as they are and CUDA graphs capture.

Which rows are active is not an argument: a body reads it from the `ActiveRows` that `key` stands for, as vLLM's own ops
read theirs, so that a captured launch is right for every later step.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.library import Library, infer_schema, register_fake

from lorazor.kernels.dispatch import add_lora, kernels_for, path_for
from lorazor.kernels.metadata import TileList

# Part of each op's name. Bodies are not traced, so a change of what an op means reaches vLLM's compile cache by it.
VERSION = 1
# Own ranks are rounded up to this in the kernels, so a narrower buffer has none.
RANK_STEP = 8


class ActiveRows:
    """What the bodies read: the step's tile list, each slot's own rank, and whether nobody is active.

    `nobody` is a host flag, so a body may use it to leave at once, and for nothing else. It is right because a body
    runs in three places only. Eagerly: the flag is this step's. In the capture of a graph for no adapter: vLLM sets up
    a mapping of zeros first, and later replays that graph only for steps of requests without adapters. In the capture
    of any other graph: vLLM sets up a mapping full of adapters first, so the launch is captured, and a replay for a
    step in which nobody is active (all released) finds an empty tile list.
    """

    def __init__(self, max_rows: int, max_loras: int, ranks: torch.Tensor, full_rank: int) -> None:
        """`ranks`: int32 [max_loras] on the device, each slot's own rank; `full_rank`: that of the weight buffers."""
        self.tiles = TileList(max_rows, max_loras, ranks.device)
        self.ranks, self.full_rank = ranks, full_rank
        self.nobody = True
        self.launches = 0
        self.key = torch.zeros(1, dtype=torch.int32)
        _KNOWN[self.key.data_ptr()] = self

    def own_ranks(self, rank: int) -> torch.Tensor | None:
        """`ranks` where they bound the columns of a buffer of `rank`; a shard of the rank takes all of its columns."""
        return self.ranks if rank == self.full_rank and rank % RANK_STEP == 0 else None


# By the address of `key`, a tensor on the CPU that lives as long as its owner.
_KNOWN: WeakValueDictionary[int, ActiveRows] = WeakValueDictionary()


def add_linear(
    active: ActiveRows,
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a: list[torch.Tensor],
    lora_b: list[torch.Tensor],
    add: bool = True,
) -> None:
    """y[rows] += (x @ A.T) @ B.T for the active rows; the slices lie side by side in y [..., columns]."""
    active.launches += 1
    y, x = y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1]).to(lora_a[0].dtype)
    tiles, ranks = active.tiles.view(x.shape[0]), active.own_ranks(lora_b[0].shape[3])
    if y.dtype == lora_b[0].dtype:
        add_lora(y, x, lora_a, lora_b, tiles, add=add, ranks=ranks)
        return
    # A router or a head may answer in float32 while its adapter is in half precision.
    delta = add_lora(torch.zeros_like(y, dtype=lora_b[0].dtype), x, lora_a, lora_b, tiles, ranks=ranks)
    y.add_(delta) if add else y.copy_(delta)


def _add_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a: list[torch.Tensor],
    lora_b: list[torch.Tensor],
    key: torch.Tensor,
    add: bool,
) -> None:
    active = _KNOWN[key.data_ptr()]
    if not active.nobody:
        add_linear(active, y, x, lora_a, lora_b, add)


def _shrink(out: torch.Tensor, x: torch.Tensor, lora_a: list[torch.Tensor], key: torch.Tensor) -> None:
    # out: [slices, rows, rank]. What it holds for rows without an adapter means nothing: expand does not read it.
    active = _KNOWN[key.data_ptr()]
    if active.nobody:
        return
    active.launches += 1
    x = x.reshape(-1, x.shape[-1])
    tiles, ranks = active.tiles.view(x.shape[0]), active.own_ranks(lora_a[0].shape[2])
    partial = kernels_for(path_for(x.device))[0](x, lora_a, tiles, ranks=ranks)
    # [rows, slices, splits, rank]: this layer sums over ranks before it expands, so the splits are summed here.
    out.copy_(partial.sum(2).transpose(0, 1))


def _expand(
    y: torch.Tensor, x: torch.Tensor, lora_b: list[torch.Tensor], key: torch.Tensor, offset: int, add: bool
) -> None:
    # x: [slices, rows, rank].
    active = _KNOWN[key.data_ptr()]
    if active.nobody:
        return
    active.launches += 1
    y, partial = y.view(-1, y.shape[-1]), x.transpose(0, 1).unsqueeze(2).float().contiguous()
    tiles, ranks = active.tiles.view(y.shape[0]), active.own_ranks(lora_b[0].shape[3])
    kernels_for(path_for(y.device))[1](partial, lora_b, y, tiles, offset=offset, add=add, ranks=ranks)


_LIBRARY: Any = Library("lorazor", "FRAGMENT")  # type: ignore[no-untyped-call]


def _register(name: str, body: Callable[..., None], mutated: str) -> Callable[..., None]:
    name = f"{name}_v{VERSION}"
    _LIBRARY.define(name + infer_schema(body, mutates_args=[mutated]))
    _LIBRARY.impl(name, body, "CompositeExplicitAutograd")
    register_fake(f"lorazor::{name}", lambda *args: None, lib=_LIBRARY)
    op: Callable[..., None] = getattr(torch.ops.lorazor, name).default
    return op


add_lora_op = _register("add_lora", _add_lora, "y")
shrink_op = _register("shrink", _shrink, "out")
expand_op = _register("expand", _expand, "y")
