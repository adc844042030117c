"""Every kernel once on every test shape, for NVIDIA's checker; no test by itself.

compute-sanitizer --tool memcheck --error-exitcode 9 python tests/kernels/sanitize.py
compute-sanitizer --tool racecheck --error-exitcode 9 python tests/kernels/sanitize.py
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from lorazor.kernels.dispatch import add_lora
from lorazor.kernels.metadata import TileList
from lorazor.kernels.plan import DECODE_ROWS, plan_for
from tests.kernels.cases import MAX_LORAS, SHAPES, make_layer


def main() -> None:
    """Decode and prefill, both dtypes, one sum and several."""
    for shape in SHAPES:
        for rows in (37, DECODE_ROWS + 9):
            listed = TileList(rows, MAX_LORAS, "cuda")
            listed.copy(np.arange(rows, dtype=np.int32) % (MAX_LORAS + 1) - 1)
            plan = plan_for(rows, shape[0], shape[1])
            for dtype in (torch.bfloat16, torch.float16):
                layer = make_layer(shape, rows, dtype, "cuda")
                for chosen in (plan, dataclasses.replace(plan, whole_k=True, early=False)):
                    add_lora(layer.y, layer.x, layer.lora_a, layer.lora_b, listed.view(rows), plan=chosen)
    torch.cuda.synchronize()
    print("every kernel ran")  # noqa: T201


if __name__ == "__main__":
    main()
