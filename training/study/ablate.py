"""Stage `ablate`: what the policy loses without a part of what it sees, what it looks at, and how it travels.

Every variant is the LightGBM of `lorazor train`, tuned and judged like the whole one on the same requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import lightgbm as lgb

from lorazor.features.errors import InputError
from lorazor.features.schema import FEATURES, REQUEST_FEATURES
from lorazor.training.dataset import Dataset, Tables
from lorazor.training.learned import UNPROBED, WITHOUT_PROBES, fit_lightgbm, lightgbm_policy
from lorazor.training.study.cells import Parts, load_parts, rate
from lorazor.training.study.layout import Cell, Layout
from lorazor.training.study.policies import Promise, tuned
from lorazor.training.study.results import Results
from lorazor.training.study.subsample import subsample

INTERVALS = (4, 8, 16, 32)
WHOLE = "whole"
Row = dict[str, Any]


def ablate(
    layout: Layout, cells: Sequence[Cell], promise: Promise, *, seed: int, progress: Callable[[str], None]
) -> None:
    """Add every cell to ablation.csv and importance.csv; one without a policy is told and left out."""
    table, features = Results(layout.csv("ablation")), Results(layout.csv("importance"))
    todo = [cell for cell in cells if not table.has(cell.row())]
    known = learnable(layout, cells, seed, progress) if todo else {}
    for cell in (cell for cell in todo if cell in known):
        progress(f"ablate: {cell}")
        if not features.has(cell.row()):
            booster = fit_lightgbm(known[cell].whole, seed=seed, threads=1)
            features.add({**cell.row(), **row} for row in importance(booster))
        parts = load_parts(layout, cell, seed)
        table.add({**cell.row(), **row} for row in ablated(parts, known, promise))


def learnable(layout: Layout, cells: Iterable[Cell], seed: int, progress: Callable[[str], None]) -> dict[Cell, Dataset]:
    """What each cell's policy learns from, which takes far less room than its traces."""
    found = {}
    for cell in cells:
        try:
            found[cell] = load_parts(layout, cell, seed).data
        except InputError as error:
            progress(f"  {cell} left out: {error}")
    return found


def ablated(parts: Parts, known: Mapping[Cell, Dataset], promise: Promise) -> Iterator[Row]:
    """The rows of every variant of one cell, the whole policy first."""
    yield from _rows(WHOLE, parts.data, parts, promise)
    for name, columns in {WITHOUT_PROBES: UNPROBED, "request only": REQUEST_FEATURES}.items():
        yield from _rows(name, parts.data, parts, promise, columns)
    for g in INTERVALS:
        yield from _interval_rows(g, parts, promise)
    for name, others in transfers(parts.cell, known).items():
        yield from _rows(name, together([known[other] for other in others]), parts, promise)


def transfers(cell: Cell, cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    """Which other cells a policy may come from; a transfer without any is left out."""
    others = [other for other in cells if other != cell]
    same = {
        "from the other tasks": ("backbone", "adapter"),
        "from the other backbones": ("task", "adapter"),
        "from the other adapters": ("backbone", "task"),
    }
    found = {
        name: [o for o in others if all(getattr(o, key) == getattr(cell, key) for key in keys)]
        for name, keys in same.items()
    }
    found["from all of its backbone's"] = [
        o for o in [cell, *others] if (o.backbone, o.adapter) == (cell.backbone, cell.adapter)
    ]
    return {name: them for name, them in found.items() if set(them) - {cell}}


def together(sets: Sequence[Dataset]) -> Dataset:
    """Several cells' tables as one; the rest, which fitting does not read, is the first's."""

    def merged(part: str) -> Tables:
        return {f"{i}/{task}": table for i, d in enumerate(sets) for task, table in getattr(d, part).items()}

    return replace(sets[0], whole=merged("whole"), train=merged("train"), validation=merged("validation"))


def importance(booster: lgb.Booster) -> list[Row]:
    """Each feature's share of the gain, the largest first."""
    gain = booster.feature_importance("gain")
    total = gain.sum() or 1.0
    ranked = sorted(zip(booster.feature_name(), gain, strict=True), key=lambda pair: -pair[1])
    return [{"feature": name, "share_of_gain": float(value / total)} for name, value in ranked]


def _interval_rows(g: int, parts: Parts, promise: Promise) -> Iterator[Row]:
    """The policy of a server that probes every g tokens: exact where g is a multiple of the recorded interval."""
    name, recorded = f"g = {g}", next(iter(parts.traces.values())).meta.probe_interval
    if g % recorded:
        yield {"variant": name, "note": f"not exact from traces of g = {recorded}: collect with g = {g}"}
        return
    coarse = replace(parts, traces={part: subsample(traces, g) for part, traces in parts.traces.items()})
    try:
        yield from _rows(name, coarse.data, coarse, promise)
    except InputError as error:  # the decisions that are left may be of one class
        yield {"variant": name, "note": str(error)}


def _rows(name: str, data: Dataset, parts: Parts, promise: Promise, columns: Sequence[str] = FEATURES) -> Iterator[Row]:
    """LightGBM of `data` and `columns`, tuned and judged on the cell's requests."""
    policy = rate(lightgbm_policy(name, data, seed=parts.seed, threads=1, columns=columns), parts)
    for limit in promise.limits:
        for row in tuned(policy, *limit, promise.confidence, None):
            yield {"variant": row.pop("policy"), **row}
