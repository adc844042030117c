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
    finished: bool = False


class ReportBook:
    """The newest finished requests, a bounded number of them."""

    def __init__(self, kept: int = KEPT_REPORTS) -> None:
        self._kept = kept
        self._reports: OrderedDict[str, list[Report]] = OrderedDict()

    def keep(self, report: Report) -> None:
        """Take in a finished request."""
        report.finished = True
        if report.release_step is not None and report.release_step >= report.output_tokens:
            report.release_step = None  # it ended before its boundary
        self._reports.setdefault(report.request_id, []).append(report)
        self._reports.move_to_end(report.request_id)
        while len(self._reports) > self._kept:
            self._reports.popitem(last=False)

    def get(self, public: str, live: list[Report]) -> dict[str, Any] | None:
        """The report under the id that the client knows; with n > 1 the others are listed under `siblings`."""
        reports = sorted([*self._reports.get(public, []), *live], key=lambda report: report.sibling or 0)
        if not reports:
            return None
        first, *others = map(asdict, reports)
        return {**first, "siblings": others} if others else first
