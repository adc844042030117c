"""Gives rows of a step blocks of their own: their block of every layer is copied, and their tables point at the copy.

One launch, from what the step has on the device anyway: nothing is sent there and nothing read back. See
`runtime/scratch.py` for what it is for.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# (Triton's device code is not typed Python.)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

WORD = 8  # bytes
CHUNK = 1024  # words that one program copies


@dataclass(frozen=True)
class Layers:
    """Where each layer's blocks lie: one after the other from `addresses`, each of `words`; both int64 [layers]."""

    addresses: torch.Tensor
    words: torch.Tensor
    most_words: int

    @classmethod
    def of(cls, caches: list[torch.Tensor]) -> Layers:
        """From KV caches [blocks, ...] of `WORD`-aligned blocks; a cache that layers share counts once."""
        words = {cache.data_ptr(): block_bytes(cache) // WORD for cache in caches}
        addresses, sizes = (torch.tensor(list(x), device=caches[0].device) for x in (words, words.values()))
        return cls(addresses, sizes, max(words.values()))


def block_bytes(cache: torch.Tensor) -> int:
    """From one block of a KV cache [blocks, ...] to the next."""
    return cache.stride(0) * cache.element_size()


@triton.jit(do_not_specialize=["first_row", "first_block"])
def _place(
    first_row,
    first_block,
    block_step,
    request_ptr,
    position_ptr,
    table_ptr,
    row_table_ptr,
    table_stride,
    slot_ptr,
    address_ptr,
    words_ptr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Row `program_id(0)`, layer `program_id(1)`, piece `program_id(2)` of its block."""
    i_row, i_layer, i_chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = first_row + i_row
    position = tl.load(position_ptr + row)
    column, offset = position // TOKENS, position % TOKENS
    target = (first_block + i_row * block_step).to(tl.int64)
    if (i_layer == 0) & (i_chunk == 0):
        tl.store(row_table_ptr + row * table_stride + column, target.to(tl.int32))
        tl.store(slot_ptr + row, target * TOKENS + offset)
    # The first token of a block has nothing before it there.
    if offset > 0:
        source = tl.load(table_ptr + tl.load(request_ptr + row) * table_stride + column).to(tl.int64)
        words = tl.load(words_ptr + i_layer)
        cache_ptr = tl.load(address_ptr + i_layer).to(tl.pointer_type(tl.int64))
        o_word = i_chunk * CHUNK + tl.arange(0, CHUNK)
        b_word = tl.load(cache_ptr + source * words + o_word, mask=o_word < words)
        tl.store(cache_ptr + target * words + o_word, b_word, mask=o_word < words)


def place_shadows(
    rows: range,
    blocks: range,
    requests: torch.Tensor,
    positions: torch.Tensor,
    tables: torch.Tensor,
    row_tables: torch.Tensor,
    slots: torch.Tensor,
    layers: Layers,
    block_tokens: int,
) -> None:
    """For each of `rows`: copy the block of its position to one of `blocks`, and point its table and its slot there.

    for row, block in zip(rows, blocks):
        column, offset = divmod(positions[row], block_tokens)
        for cache in caches:
            cache[block] = cache[tables[requests[row], column]]  # what lies before `offset` of it
        row_tables[row, column] = block
        slots[row] = block * block_tokens + offset

    Args:
        rows: rows of the step; only rows of one token stand before them, so they are their tokens too.
        blocks: at least as many, in nobody's table.
        requests: each row's row of `tables`, int32 [n].
        positions: of each token, int64 [n tokens].
        tables: block tables by request, int32 [requests, columns].
        row_tables: block tables by row, int32 [rows, columns], of the same stride.
        slots: where each token's keys and values go, int64 [n tokens].
    """
    _place[(len(rows), len(layers.words), triton.cdiv(layers.most_words, CHUNK))](
        first_row=rows.start,
        first_block=blocks.start,
        block_step=blocks.step,
        request_ptr=requests,
        position_ptr=positions,
        table_ptr=tables,
        row_table_ptr=row_tables,
        table_stride=tables.stride(0),
        slot_ptr=slots,
        address_ptr=layers.addresses,
        words_ptr=layers.words,
        TOKENS=block_tokens,
        CHUNK=CHUNK,
        num_warps=4,
    )
