"""The policy on the device: windows and forest follow the signals there, and only scores travel home.

Nothing here waits for the device. Decisions at admission stay with the host, which has all they need.
"""

from __future__ import annotations

import torch

from lorazor.kernels import forest, window
from lorazor.policy.forest import Forest


class DevicePolicy:
    """Windows of up to `capacity` requests, the trees that score them, and room for steps of `rows` rows.

    Args:
        interval: g, if every row at a decision step is due a score; None: those that were probed.

    A step that vLLM made, dropped after a preemption and made again counts once, as `kernels.window` explains.

    Raises:
        ValueError: the forest does not fit the kernels' records.
    """

    def __init__(
        self, trees: Forest, capacity: int, rows: int, device: torch.device, interval: int | None = None
    ) -> None:
        self.interval = interval
        self._trees = forest.pack(**vars(trees), device=device)
        self._state = torch.zeros((capacity, window.STATE), dtype=torch.float32, device=device)
        self._owners = torch.full((capacity,), -1, dtype=torch.int32, device=device)
        self._features = torch.zeros((rows, window.FEATURES), dtype=torch.float32, device=device)
        self._due = torch.full((rows,), -1, dtype=torch.int32, device=device)

    def push(
        self, signals: torch.Tensor, probes: torch.Tensor, windows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take in one step; features float32 [n, F], and int32 [n], the row where a score is due, else -1.

        Args:
            signals: float32 [n, 4]. probes: float32 [n, 5], all NaN where not probed.
            windows: int32 [6, n], as `Followed.windows` gives it.
        """
        n, (places, serials, steps) = len(signals), windows[:3]
        return window.push(
            self._state,
            self._owners,
            signals,
            probes,
            places,
            serials,
            steps,
            windows[3:].view(torch.float32),
            interval=self.interval,
            features=self._features[:n],
            due=self._due[:n],
        )

    def score(
        self, signals: torch.Tensor, probes: torch.Tensor, windows: torch.Tensor, out: torch.Tensor | None
    ) -> None:
        """Take in one step, as `push`; the scores of the rows due go to `out`, float64 [n] (None: no row is)."""
        features, due = self.push(signals, probes, windows)
        if out is not None:
            forest.score(self._trees, features, rows=due, out=out)
