"""Stage `adapters`: one adapter per backbone, task and kind, each trained until validation stops improving."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from lorazor.features.errors import InputError
from lorazor.training.finetune import finetune
from lorazor.training.finetune_config import finetune_config
from lorazor.training.finetune_cuts import Cut
from lorazor.training.finetune_save import RECORD
from lorazor.training.finetune_store import Checkpoints
from lorazor.training.study.layout import ADAPTER_TRAIN, ADAPTER_VALIDATION, Cell, Layout
from lorazor.training.study.results import Results

CUTS = {"ordinary": Cut.NEVER, "prompt-only": Cut.PROMPT, "release-aware": Cut.RELEASE_AWARE}
"""What sets the kinds apart; all else is the same for all, unless the options say otherwise."""


def adapters(
    layout: Layout,
    base: Path,
    tasks: Iterable[str],
    kinds: Iterable[str],
    options: Mapping[str, Any],
    progress: Callable[[str], None],
    init_from: str | None = None,
) -> None:
    """Train what is not there, one after the other, going on with a run that was stopped; curves go to curves.csv.

    Args:
        options: of `FinetuneConfig`, for every adapter.
        init_from: a kind whose adapter of the same backbone and task all other kinds go on from.

    Raises:
        InputError: the adapter to go on from is not there.
    """
    curves = Results(layout.csv("curves"))
    kinds = sorted(kinds, key=lambda kind: kind != init_from)
    for cell in [Cell(base.resolve().name, task, kind) for task in tasks for kind in kinds]:
        out = layout.adapter(cell)
        if not out.exists():
            progress(f"adapters: {cell}")
            out.parent.mkdir(parents=True, exist_ok=True)
            config = finetune_config(
                model=base,
                data=(layout.part(cell.task, ADAPTER_TRAIN),),
                validation=layout.part(cell.task, ADAPTER_VALIDATION),
                **{"cut": CUTS[cell.adapter], "init": _begun(layout, cell, init_from), **options},
            )
            finetune(config, out, resume=Checkpoints(out).folder.exists(), mlflow_uri=None, progress=progress)
        if not curves.has(cell.row()):
            curves.add({**cell.row(), **row} for row in curve_rows(out))


def _begun(layout: Layout, cell: Cell, kind: str | None) -> Path | None:
    if kind is None or kind == cell.adapter:
        return None
    found = layout.adapter(Cell(cell.backbone, cell.task, kind))
    if not found.exists():
        raise InputError(f"--init-from {kind}: {found} is not there yet, so {cell} has nothing to go on from")
    return found


def curve_rows(adapter: Path) -> list[dict[str, Any]]:
    """Everything that was logged in training, a row per step and metric; `best` marks the step that was kept."""
    record = json.loads((adapter / RECORD).read_text(encoding="utf-8"))
    return [
        {"step": row["step"], "metric": name, "value": value, "best": row["step"] == record["best_step"]}
        for row in record["log"]
        for name, value in row.items()
        if name.endswith(("loss", "exact")) and name != "train_loss"
    ]
