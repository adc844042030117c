"""What the server can tell about each request: while it runs, and for a while after."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

KEPT_REPORTS = 10_000
_ENDED = 1 << 62  # more tokens than any step of a request that has ended comes after


@dataclass
class Report:
    """One request: `release_step` is null while, or if, every token had the adapter; `sibling` is null where n = 1."""

    request_id: str
    adapter: str
    arm: str
    task: str | None
    sibling: int | None = None
    release_step: int | None = None
    score: float | None = None
    output_tokens: int = 0

    def shown(self) -> dict[str, Any]:
        """As the client is told: a release counts once a token was made without the adapter."""
        took_effect = self.release_step is not None and self.output_tokens > self.release_step
        return {**asdict(self), "release_step": self.release_step if took_effect else None}


class ReportBook:
    """The live requests, and the newest finished ones, a bounded number of them.

    Attributes:
        live: the reports of live requests by internal id; their `output_tokens` are filled in when they are asked for.
    """

    def __init__(self, kept: int = KEPT_REPORTS) -> None:
        self.live: dict[str, Report] = {}
        self._made: dict[str, int] = {}  # output tokens of live requests, apart: a step updates them all in one call
        self._kept = kept
        self._finished: OrderedDict[str, list[Report]] = OrderedDict()

    def start(self, internal: str, report: Report) -> None:
        """Take in a new request."""
        self.live[internal], self._made[internal] = report, 0

    def uncounted(self, ids: Sequence[str], steps: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
        """Which of these requests' tokens at these c are not counted yet [n]; none of a request that has ended."""
        made = np.fromiter(map(self._made.get, ids, repeat(_ENDED)), np.int64, len(ids))
        found: NDArray[np.bool_] = steps >= made
        return found

    def count(self, ids: Sequence[str], steps: NDArray[np.integer[Any]]) -> None:
        """Count the tokens that these live requests made at these c [n]."""
        self._made.update(zip(ids, (steps + 1).tolist(), strict=True))

    def finish(self, internal: str) -> None:
        """A live request has ended; its report is kept until there are too many."""
        report = self._counted(internal)
        del self.live[internal], self._made[internal]
        self._finished.setdefault(report.request_id, []).append(report)
        self._finished.move_to_end(report.request_id)
        while len(self._finished) > self._kept:
            self._finished.popitem(last=False)

    def get(self, public: str) -> dict[str, Any] | None:
        """The report under the id that the client knows; with n > 1 the others are listed under `siblings`."""
        live = [self._counted(internal) for internal, report in self.live.items() if report.request_id == public]
        reports = sorted([*self._finished.get(public, []), *live], key=lambda report: report.sibling or 0)
        if not reports:
            return None
        first, *others = (report.shown() for report in reports)
        return {**first, "siblings": others} if others else first

    def _counted(self, internal: str) -> Report:
        report = self.live[internal]
        report.output_tokens = self._made[internal]
        return report
