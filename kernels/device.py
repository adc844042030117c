"""Device functions that both kernels use."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# (Triton's device code is not typed Python.)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def slot_rank(ranks_ptr, slot, RANK: tl.constexpr, HAS_RANKS: tl.constexpr):
    """The columns that the slot's adapter fills, rounded up to 8 so that loads stay 16 bytes wide."""
    if HAS_RANKS:
        return (tl.load(ranks_ptr + slot) + 7) // 8 * 8
    else:
        return RANK


@triton.jit
def three_way(i, first, second, third):
    """first, second or third, for i = 0, 1, 2."""
    return tl.where(i == 0, first, tl.where(i == 1, second, third))
