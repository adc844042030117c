"""Tile shapes and split sizes: every choice that decides in which order a row's products are added.

A row's bits must not depend on its company, so the choices that touch the order of additions (`chunk`, `LANES`) come
from the module's shape alone. What may follow the number of rows in the launch (`whole_k`, block sizes, programs)
changes who does the work, not the order: with `whole_k` one program adds all chunks itself, in the order in which
expand otherwise adds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

# Steps up to vLLM's largest captured batch (512) use small tiles; larger steps hold a prefill.
DECODE_ROWS = 512
# The fewest rows that a tensor-core product takes; twice as many still use the same instruction, hence the same bits.
DECODE_BLOCK = 16
PREFILL_BLOCK = 32
MAX_SLICES = 3  # of one launch; what vLLM's fused projections (q, k, v) need
# Parts of a chunk that are summed side by side, one per warp, so that no warp waits for a long chain of products.
LANES = 8
# From this many rows times rank on, partial sums cost more memory and traffic than the parallelism of split-K gains.
WHOLE_K_WORK = 1 << 19


@dataclass(frozen=True)
class Plan:
    """How one module's two launches are cut up."""

    chunk: int  # input features whose products are summed before they meet other chunks' sums; the split-K unit
    block_k: int  # input features loaded at once; divides chunk
    shrink_rank: int  # ranks computed by one shrink unit
    whole_k: bool  # one shrink unit does all chunks and writes one sum
    early: bool  # load a whole chunk of A before waiting for the kernel before; needs block_k == chunk, not whole_k
    stages: int  # of shrink's software pipeline, where a chunk takes several blocks
    block_n: int  # output features of one expand unit
    shrink_programs: int  # programs per multiprocessor, at most; a program takes units in turn
    expand_programs: int
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


def padded_rank(rank: int) -> int:
    """The rank as a matrix product takes it: a power of two, at least 16."""
    return max(16, 1 << (rank - 1).bit_length())


@lru_cache(maxsize=4096)
def plan_for(rows: int, in_features: int, rank: int) -> Plan:
    """The plan for a launch of `rows` rows on a module of `in_features` and adapters of (up to) `rank`."""
    padded = padded_rank(rank)
    prefill, wide = rows > DECODE_ROWS, padded > 32
    whole_k = rows * padded >= WHOLE_K_WORK
    chunk = 1024 if in_features > 512 else 512
    return Plan(
        chunk=chunk,
        block_k=512 if prefill else chunk,
        # A chunk of more ranks than these does not fit beside the kernel before, whose end it is to wait for.
        shrink_rank=min(padded, 32) if prefill or not wide else 16,
        whole_k=whole_k,
        early=not prefill and not whole_k,
        stages=2,
        block_n=max(64, min(512, 16384 // padded)) // (2 if prefill else 1),
        shrink_programs=16 if prefill else 2,
        expand_programs=8 if wide and not prefill else 4,
        expand_warps=4 if wide and not prefill else 8,
    )
