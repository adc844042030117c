"""Stage `texts`: format constraints and refusals of the test requests' outputs, before and after a release."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from lorazor.features.errors import InputError
from lorazor.policy.artifact import load_artifact
from lorazor.training.compare import BASE_ONLY, NEVER_RELEASED
from lorazor.training.learned import LEARNED
from lorazor.training.output_texts import OutputTexts
from lorazor.training.replay import Outcome, ReplayTable
from lorazor.training.study.cells import Parts, load_parts
from lorazor.training.study.formats import FORMATS, refuses
from lorazor.training.study.layout import TEST, Cell, Layout
from lorazor.training.study.numbers import ALL, prompt_only
from lorazor.training.study.policies import PROMPT_ONLY
from lorazor.training.study.results import Results, read_rows

Row = dict[str, Any]
Tuned = dict[tuple[str, float], float | None]
"""Threshold by loss kind and max-drop."""


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


def thresholds(layout: Layout, cell: Cell) -> Tuned:
    """The learnt policy's threshold at each limit, None for never; nothing where no policy could be learnt."""
    if not layout.csv("policies").exists():
        raise InputError(f"{layout.out} has no policies.csv: run the stage policies first")
    rows = read_rows(layout.csv("policies"))
    mine = (rows[list(cell.row())] == list(cell.row().values())).all(axis=1)
    rows = rows[mine & (rows["policy"] == LEARNED) & (rows["scope"] == ALL)]
    found = zip(rows["loss_kind"], rows["max_drop"], rows["threshold"], strict=True) if len(rows) else ()
    return {(kind, float(drop)): None if at != at else float(at) for kind, drop, at in found}


def text_rows(parts: Parts, tuned: Tuned, layout: Layout) -> Iterator[Row]:
    """A row for each way to answer: never released, released by the policy, after the prompt, and the base alone."""
    found, table, task = OutputTexts(parts.traces[TEST]), parts.tables[TEST], parts.cell.task
    ids = [str(i) for i in table.request_id]
    yield judged(NEVER_RELEASED, [found.never(i) for i in ids], task)
    # As in policies.csv, a request whose rollout was left out is not released.
    yield judged(PROMPT_ONLY, after(found, table, prompt_only(table)), task)
    yield judged(BASE_ONLY, [found.base(i) for i in ids], task)
    scores = load_artifact(layout.artifact(parts.cell)).scorer.score(table.features) if tuned else np.empty(0)
    for (kind, max_drop), threshold in tuned.items():
        outcome = table.outcome(table.first_decision(scores, threshold))
        given = judged(LEARNED, after(found, table, outcome), task)
        yield {**given, "loss_kind": kind, "max_drop": max_drop, "released": int(outcome.released.sum())}


def after(found: OutputTexts, table: ReplayTable, outcome: Outcome) -> list[str]:
    """The text of every request: that of its release step, or the never-released one."""
    kept = zip(map(str, table.request_id), outcome.release.tolist(), outcome.released.tolist(), strict=True)
    return [found.released(i, step) if released else found.never(i) for i, step, released in kept]


def judged(way: str, given: list[str], task: str) -> Row:
    """How many of these texts keep the task's format (None: it has none), and how many refuse."""
    fits = FORMATS.get(task)
    formatted = None if fits is None else sum(map(fits, given))
    return {"way": way, "n": len(given), "format": formatted, "refusals": sum(map(refuses, given))}
