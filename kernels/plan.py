"""Tile shapes and split sizes: every choice that decides in which order a row's products are added.

A row's bits must not depend on its company, so the choices that touch the order of additions (`chunk`, `shrink_rank`,
`expand_rank`) come from the module's shape alone. What may follow the number of rows in the launch (`block_rows`,
`whole_k`, block sizes, warps) changes who does the work, not the order: with `whole_k` one program adds all chunks
itself, in the order in which expand otherwise adds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

# Steps up to vLLM's largest captured batch (512) use small tiles; larger steps hold a prefill.
DECODE_ROWS = 512
# The fewest rows that a tensor-core product takes; twice as many still use the same instruction, hence the same bits.
DECODE_BLOCK = 16
PREFILL_BLOCK = 32
# From this many rows times rank on, partial sums cost more traffic than the parallelism of split-K gains.
WHOLE_K_WORK = 1 << 16


@dataclass(frozen=True)
class Plan:
    """How one module's two launches are cut up."""

    chunk: int  # input features whose products are summed before they meet other chunks' sums; the split-K unit
    block_k: int  # input features loaded at once; divides chunk
    shrink_rank: int  # ranks computed by one shrink program
    whole_k: bool  # one shrink program does all chunks and writes one sum
    shrink_warps: int
    shrink_stages: int
    expand_rank: int  # ranks multiplied at once in expand
    block_n: int  # output features of one expand program
    expand_warps: int
    pdl: bool = True  # programmatic dependent launch, where the device has it

    def splits(self, in_features: int) -> int:
        """The number of partial sums that shrink writes and expand adds."""
        return 1 if self.whole_k else -(-in_features // self.chunk)


def block_rows(rows: int) -> int:
    """Rows of one tile in a launch of `rows` rows (the captured graph's, padding included)."""
    return DECODE_BLOCK if rows <= DECODE_ROWS else PREFILL_BLOCK


def tile_bound(rows: int, max_loras: int) -> int:
    """The most tiles that `rows` rows over `max_loras` slots can need: full tiles, and a ragged one per slot."""
    return -(-rows // block_rows(rows)) + min(max_loras, rows)


@lru_cache(maxsize=4096)
def plan_for(rows: int, in_features: int, rank: int) -> Plan:
    """The plan for a launch of `rows` rows on a module of `in_features` and adapters of (up to) `rank`."""
    small = rank <= 32
    chunk = (512 if small else 1024) * (1 if in_features <= 8192 else 2)
    padded = max(16, 1 << (rank - 1).bit_length())
    prefill = rows > DECODE_ROWS
    shrink_rank = min(padded, 32 if rank <= 64 else 64)
    return Plan(
        chunk=chunk,
        block_k=128 if prefill else (512 if shrink_rank == 16 else 256),
        shrink_rank=shrink_rank,
        whole_k=prefill and rows * rank >= WHOLE_K_WORK,
        shrink_warps=4,
        shrink_stages=3 if prefill else 2,
        expand_rank=min(padded, 64),
        block_n=256 if padded == 16 else 128,
        expand_warps=4,
    )
