"""Stage `report`: tables in Markdown and figures, from the rows of the CSV files and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from lorazor.features.errors import InputError
from lorazor.training.provenance import atomic_write_text
from lorazor.training.study.e2e import e2e_table
from lorazor.training.study.figures import draw
from lorazor.training.study.layout import Layout
from lorazor.training.study.results import read_rows
from lorazor.training.study.tables import (
    ablation_table,
    above_bound,
    curve_table,
    flip_table,
    mean_table,
    policy_table,
    prompt_only_table,
    since_table,
    split_table,
    text_table,
)

TABLES = (
    *("split", "curves", "diagnosis", "policies", "bands", "since"),
    *("guarantee", "drift", "ablation", "importance", "texts", "e2e"),
)


def report(layout: Layout, progress: Callable[[str], None]) -> Path:
    """Write report/study.md and its figures from every table that is there; the path of the text.

    Raises:
        InputError: there is no table at all.
    """
    tables = {name: read_rows(layout.csv(name)) for name in TABLES if layout.csv(name).exists()}
    if not tables:
        raise InputError(f"{layout.out} holds no results: run the other stages first")
    progress(f"report: {', '.join(tables)}")
    folder = layout.out / "report"
    figures = draw(folder, tables)
    sections = [f"## {title}\n\n{text}" for title, text in _sections(tables)]
    images = [f"![{path.stem}]({path.name})" for path in figures]
    atomic_write_text(folder / "study.md", "\n\n".join([*sections, *images]) + "\n")
    return folder / "study.md"


def _sections(tables: dict[str, pd.DataFrame]) -> list[tuple[str, str]]:
    made: list[tuple[str, str, Callable[[pd.DataFrame], pd.DataFrame]]] = [
        ("Requests of each part", "split", split_table),
        ("The adapters' validation at the step that was kept", "curves", curve_table),
        ("Released after the prompt (r = 1)", "policies", prompt_only_table),
        ("Tuned policies on the test requests (S > 0)", "policies", policy_table),
        ("Means over cells (S > 0)", "policies", mean_table),
        ("Cells above their bound", "policies", above_bound),
        ("The guarantee", "guarantee", lambda t: t),
        ("Drift: calibrated on short requests", "drift", lambda t: t),
        ("Score by tokens since the release (S > 0)", "since", since_table),
        ("Without a part, and from elsewhere (S > 0)", "ablation", ablation_table),
        ("Served end to end, beside replay", "e2e", e2e_table),
        ("What flips first when released", "diagnosis", flip_table),
        ("Outputs that keep their format, and refusals", "texts", text_table),
    ]
    return [(title, markdown(function(tables[name]))) for title, name, function in made if name in tables]


def markdown(table: pd.DataFrame) -> str:
    """A Markdown table; numbers with three digits, empty where there is none."""
    head = ["| " + " | ".join(map(str, table.columns)) + " |", "|" + "---|" * len(table.columns)]
    return "\n".join([*head, *("| " + " | ".join(map(_cell, row)) + " |" for row in table.itertuples(index=False))])


def _cell(value: Any) -> str:
    if value is None or value != value:
        return ""
    if isinstance(value, float):  # a count is one as well where its column has gaps
        return f"{value:.0f}" if value.is_integer() or abs(value) >= 1000 else f"{value:.3g}"
    return str(value)
