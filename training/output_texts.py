"""The texts of a collection that kept them (`texts: true`), by request and outcome."""

from __future__ import annotations

from lorazor.features.errors import InputError
from lorazor.training.traces import TraceSet


class OutputTexts:
    """Never-released, released and base texts; one that was not stored is the never-released one.

    Raises:
        InputError: the collection kept no texts, or not those of every outcome.
    """

    def __init__(self, traces: TraceSet) -> None:
        every = traces.rollouts
        own = (every["mode"] == "adapter") | ~every["same_text"]
        lacking = int((every["text"].isna() & own).sum())
        if lacking:
            which = "no texts" if lacking == own.sum() else f"no texts of {lacking:,} of its {own.sum():,} outcomes"
            raise InputError(f"the collection kept {which}: collect with `texts: true` in its YAML file")
        rows = every[own]
        steps = rows["release_step"].astype("float64").fillna(0).astype(int)
        self._own = dict(zip(zip(rows["request_id"], rows["mode"], steps, strict=True), rows["text"], strict=True))

    def never(self, request: str) -> str:
        """The never-released text."""
        return str(self._own[request, "adapter", 0])

    def released(self, request: str, step: int) -> str:
        """The text of a release at this step."""
        return str(self._own.get((request, "released", step), self.never(request)))

    def base(self, request: str) -> str:
        """The text of the base alone."""
        return str(self._own.get((request, "base", 0), self.never(request)))

    def differs(self, request: str, step: int) -> bool:
        """Whether a release at this step changes the text."""
        return (request, "released", step) in self._own
