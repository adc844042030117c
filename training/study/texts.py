"""Stage `texts`: format constraints and refusals of the test requests' outputs, before and after a release."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lorazor.features.errors import InputError
from lorazor.policy.artifact import load_artifact
from lorazor.training.output_texts import OutputTexts
from lorazor.training.publish import LEARNED
from lorazor.training.study.cells import Parts, load_parts
from lorazor.training.study.formats import FORMATS, refuses
from lorazor.training.study.layout import TEST, Cell, Layout
from lorazor.training.study.numbers import ALL
from lorazor.training.study.results import Results, read_rows

Row = dict[str, Any]


def texts(layout: Layout, cells: Iterable[Cell], *, seed: int, progress: Callable[[str], None]) -> None:
    """Add every cell to texts.csv.

    Raises:
        InputError: the stage `policies` has not run, or a collection kept no texts.
    """
    table = Results(layout.csv("texts"))
    for cell in cells:
        if not table.has(cell.row()):
            progress(f"texts: {cell}")
            parts = load_parts(layout, cell, seed)
            table.add({**cell.row(), **row} for row in text_rows(parts, thresholds(layout, cell), layout))


def thresholds(layout: Layout, cell: Cell) -> dict[float, float | None]:
    """The learnt policy's threshold at each max-drop, None for never; nothing where no policy could be learnt."""
    if not layout.csv("policies").exists():
        raise InputError(f"{layout.out} has no policies.csv: run the stage policies first")
    rows = read_rows(layout.csv("policies"))
    mine = (rows[list(cell.row())] == list(cell.row().values())).all(axis=1)
    rows = rows[mine & (rows["policy"] == LEARNED) & (rows["scope"] == ALL)]
    pairs = zip(rows["max_drop"], rows["threshold"], strict=True) if len(rows) else ()
    return {float(drop): None if found != found else float(found) for drop, found in pairs}


def text_rows(parts: Parts, tuned: dict[float, float | None], layout: Layout) -> Iterator[Row]:
    """A row for each way to answer: never released, released by the policy, after the prompt, and the base alone."""
    found, table = OutputTexts(parts.traces[TEST]), parts.tables[TEST]
    ids, task = [str(i) for i in table.request_id], parts.cell.task
    yield judged("never", [found.never(i) for i in ids], task)
    yield judged("prompt only", [found.released(i, 1) for i in ids], task)
    yield judged("base only", [found.base(i) for i in ids], task)
    scores = load_artifact(layout.artifact(parts.cell)).scorer.score(table.features) if tuned else None
    for max_drop, threshold in tuned.items():
        assert scores is not None
        outcome = table.outcome(table.first_decision(scores, threshold))
        kept = zip(ids, outcome.release.tolist(), outcome.released.tolist(), strict=True)
        given = [found.released(i, r) if released else found.never(i) for i, r, released in kept]
        yield {**judged(LEARNED, given, task), "max_drop": max_drop, "released": int(outcome.released.sum())}


def judged(way: str, given: list[str], task: str) -> Row:
    """How many of these texts keep the task's format (None: it has none), and how many refuse."""
    fits = FORMATS.get(task)
    formatted = None if fits is None else sum(map(fits, given))
    return {"way": way, "n": len(given), "format": formatted, "refusals": sum(map(refuses, given))}
