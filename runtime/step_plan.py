"""Which rows of a step want what, and whose windows they are: worked out on the host, one copy to the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

_LISTED, _PROBED, _BASE, _WINDOWS, _FIELDS = 0, 1, 2, 3, 9


class StepPlan:
    """Lists of rows for the signals' kernels, and the rows' windows for the policy, on the device.

    Args:
        listed: the batch's rows whose signals are wanted.
        pairs: (row of the batch, row of the base's logits) of each probe; the former are listed too.
        windows: int32 [6, n] as `Followed.windows` gives it; None: no policy asks.
        max_rows: the most rows that any batch has.
    """

    def __init__(
        self,
        listed: Sequence[int],
        pairs: Sequence[tuple[int, int]],
        windows: NDArray[np.int32] | None,
        max_rows: int,
        device: torch.device,
    ) -> None:
        # Every field starts on 16 bytes: Triton compiles another variant for pointers that do not.
        fields = np.full((_FIELDS, -(-max_rows // 4) * 4), -1, np.int32)
        fields[_LISTED, : len(listed)] = listed
        if pairs:
            fields[_PROBED : _BASE + 1, : len(pairs)] = np.array(pairs, np.int32).T
        n = 0 if windows is None else windows.shape[1]
        if windows is not None:
            fields[_WINDOWS:, :n] = windows
        sent = _to_device(fields, device)
        self.listed, self.probed, self.base = sent[_LISTED, : len(listed)], *sent[_PROBED:_WINDOWS, : len(pairs)]
        self.windows = sent[_WINDOWS:, :n]


def _to_device(fields: NDArray[np.int32], device: torch.device) -> torch.Tensor:
    """Without a wait: pinned memory is kept by PyTorch until the copy is through."""
    host = torch.from_numpy(fields)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
