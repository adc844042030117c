"""What a step's kernels are told and what they found, on their way between host and device: nobody waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Rows = Sequence[int] | NDArray[np.integer]

LISTED, PROBED, BASE, WINDOWS, FIELDS = 0, 1, 2, 3, 9
# vLLM launches step k + 2 only after the output of step k was read, so two steps are under way at most.
DEPTH = 4


@dataclass(frozen=True)
class StepPlan:
    """What is wanted of a step's rows.

    Attributes:
        listed: the rows whose signals are wanted.
        pairs: (row, row of the base's logits) of each probe; the former are listed too.
        windows: int32 [6, n] as `Followed.windows` gives it; None: no policy asks.
    """

    listed: Rows
    pairs: Sequence[tuple[int, int]] = ()
    windows: NDArray[np.int32] | None = None


class Staging:
    """Lists to the device and findings home, between fixed addresses there and the pinned memory of the last steps.

    Attributes:
        lists: int32 [FIELDS, rows] on the device; -1 where a list has ended.

    Args:
        rows: the most rows that any step has.
        found: float32 [m] on the device, what comes home.
    """

    def __init__(self, rows: int, found: torch.Tensor) -> None:
        on_gpu = found.device.type == "cuda"
        self.lists = torch.full((FIELDS, rows), -1, dtype=torch.int32, device=found.device)
        self._found = found
        self._out = [torch.full((FIELDS, rows), -1, dtype=torch.int32, pin_memory=on_gpu) for _ in range(DEPTH)]
        self._home = [torch.zeros(len(found), dtype=found.dtype, pin_memory=on_gpu) for _ in range(DEPTH)]
        self._gone = [torch.cuda.Event() for _ in range(DEPTH if on_gpu else 0)]  # type: ignore[no-untyped-call]
        self._turn = 0

    def send(self, plan: StepPlan, base: Sequence[int] = ()) -> None:
        """Put a step's lists on the device; rows in `base` are listed behind the plan's."""
        self._turn = (self._turn + 1) % DEPTH
        if self._gone:
            self._gone[self._turn].synchronize()  # long past
        fields = self._out[self._turn].numpy()
        fields.fill(-1)
        n = len(plan.listed)
        fields[LISTED, :n] = plan.listed
        fields[LISTED, n : n + len(base)] = base
        if plan.pairs:
            fields[PROBED:WINDOWS, : len(plan.pairs)] = np.array(plan.pairs, np.int32).T
        if plan.windows is not None:
            fields[WINDOWS:, : plan.windows.shape[1]] = plan.windows
        self.lists.copy_(self._out[self._turn], non_blocking=True)
        if self._gone:
            self._gone[self._turn].record()

    def fetch(self, start: int, stop: int) -> torch.Tensor:
        """float32 [stop - start], a part of what was found: on the host once the device is through with the step.

        The copy is in the order of the main stream, so the next step cannot overwrite what it reads, and vLLM's own
        copies, for which its output waits, come after it. Its memory is used again DEPTH steps later.
        """
        home = self._home[self._turn][start:stop]
        return home.copy_(self._found[start:stop], non_blocking=True)
