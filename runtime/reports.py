"""What the server can tell about each request: while it runs, and for a while after."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import asdict, dataclass
from typing import Any

KEPT_REPORTS = 10_000


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
    """The newest finished requests, a bounded number of them."""

    def __init__(self, kept: int = KEPT_REPORTS) -> None:
        self._kept = kept
        self._reports: OrderedDict[str, list[Report]] = OrderedDict()

    def keep(self, report: Report) -> None:
        """Take in a finished request."""
        self._reports.setdefault(report.request_id, []).append(report)
        self._reports.move_to_end(report.request_id)
        while len(self._reports) > self._kept:
            self._reports.popitem(last=False)

    def get(self, public: str, live: list[Report]) -> dict[str, Any] | None:
        """The report under the id that the client knows; with n > 1 the others are listed under `siblings`."""
        reports = sorted([*self._reports.get(public, []), *live], key=lambda report: report.sibling or 0)
        if not reports:
            return None
        first, *others = (report.shown() for report in reports)
        return {**first, "siblings": others} if others else first
