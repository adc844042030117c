"""Stage `report`: tables in Markdown and figures, from the rows of the CSV files and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
from scipy import stats

from lorazor.features.errors import InputError
from lorazor.training.provenance import atomic_write_text
from lorazor.training.publish import LEARNED
from lorazor.training.study.e2e import e2e_table
from lorazor.training.study.figures import draw
from lorazor.training.study.layout import Layout
from lorazor.training.study.numbers import SOLVED
from lorazor.training.study.policies import PROMPT_ONLY
from lorazor.training.study.results import read_rows

TABLES = (
    "split",
    "curves",
    "diagnosis",
    "policies",
    "bands",
    "since",
    "guarantee",
    "drift",
    "ablation",
    "importance",
    "texts",
    "e2e",
)
CELL = ["backbone", "task", "adapter"]
SIGNIFICANT = 0.05


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
        ("Released after the prompt (r = 1)", "policies", prompt_only_table),
        ("Tuned policies on the test requests (S > 0)", "policies", policy_table),
        ("Means over cells (S > 0)", "policies", mean_table),
        ("Cells above their bound", "policies", above_bound),
        ("The guarantee", "guarantee", lambda t: t),
        ("Drift: calibrated on short requests", "drift", lambda t: t),
        ("Score by tokens since the release (S > 0)", "since", lambda t: t),
        ("Without a part, and from elsewhere (S > 0)", "ablation", ablation_table),
        ("Served end to end, beside replay", "e2e", e2e_table),
        ("What flips first when released", "diagnosis", flip_table),
        ("Outputs that keep their format, and refusals", "texts", lambda t: t),
    ]
    return [(title, markdown(function(tables[name]))) for title, name, function in made if name in tables]


def split_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Per task, the distinct prompts of each part."""
    return rows.pivot(index="task", columns="part", values="prompts").reset_index()


def prompt_only_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Per cell, over all requests: the scores of both ends and what r = 1 keeps."""
    columns = [*CELL, "n", "q_base", "q_adapter", "q_policy", "drop", "retention", "length_ratio"]
    found = rows[(rows["policy"] == PROMPT_ONLY) & (rows["scope"] != SOLVED)][columns]
    return found.rename(columns={"q_policy": "q_prompt_only"})


def policy_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Per cell, policy and max-drop, judged over the requests with S > 0."""
    columns = ["policy", "max_drop", "threshold", "n", "q_base", "q_adapter", "q_policy", "drop"]
    columns += ["active_row_share", "length_ratio", "retention", "oracle_gap"]
    return _tuned(rows).reindex(columns=[*CELL, *columns])


def mean_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Per kind of adapter, policy and max-drop, means over tasks and backbones; never releasing counts as no drop."""
    groups = _tuned(rows).groupby(["adapter", "max_drop", "policy"], sort=False)
    means = groups[["drop", "active_row_share", "oracle_gap"]].mean()
    means.insert(0, "cells", groups.size())
    return means.reset_index()


def _tuned(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of tuned policies over S > 0; none where no cell could learn, which leaves columns out."""
    needed = ("max_drop", "threshold", "oracle_gap")
    rows = rows.reindex(columns=list(dict.fromkeys([*rows.columns, *needed])))
    return rows[(rows["scope"] == SOLVED) & rows["max_drop"].notna()]


def above_bound(rows: pd.DataFrame) -> pd.DataFrame:
    """Per max-drop: how many cells of the learnt policy are significantly above it, and whether that is too many."""
    found = rows[(rows["policy"] == LEARNED) & (rows["scope"] != SOLVED)]
    made: list[dict[str, Any]] = []
    for max_drop, part in found.groupby("max_drop") if len(found) else ():
        row: dict[str, Any] = {"max_drop": max_drop, "cells": len(part)}
        for what in ("drop", "loss"):
            count = int((part[f"p_{what}_above"] < SIGNIFICANT).sum())
            chance = 1 - float(part["confidence"].iloc[0])
            p = stats.binomtest(count, len(part), chance, alternative="greater").pvalue
            row |= {f"{what} above": count, f"{what}: p of so many": float(p)}
        made.append(row)
    return pd.DataFrame(made)


def ablation_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Per max-drop and variant, means over the cells that have it; `note` where a variant could not be made."""
    if "scope" not in rows:
        return rows
    groups = rows[rows["scope"] == SOLVED].groupby(["max_drop", "variant"], sort=False)
    found = groups[["active_row_share", "drop"]].mean()
    found.insert(0, "cells", groups.size())
    return found.reset_index().sort_values("max_drop", kind="stable")


def flip_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Per cell: the share without a flip (the ceiling), and of the others the place and class of the first one."""
    made: list[dict[Any, Any]] = []
    for _, part in rows.groupby([*CELL, "release"]):
        classes = part["token_class"].value_counts(normalize=True)
        common = ", ".join(f"{name} {share:.0%}" for name, share in classes.head(4).items())
        cell = part[[*CELL, "release"]].iloc[0].to_dict()
        flips = {"n": len(part), "no flip": float((part["flips"] == 0).mean())}
        probabilities = part.filter(like="logprob_").mean().to_dict()
        first = {"median first flip": part["first_flip"].median(), "of class": common}
        made.append({**cell, **flips, **first, **probabilities})
    return pd.DataFrame(made)


def markdown(table: pd.DataFrame) -> str:
    """A Markdown table; numbers with three digits, empty where there is none."""
    head = ["| " + " | ".join(map(str, table.columns)) + " |", "|" + "---|" * len(table.columns)]
    return "\n".join([*head, *("| " + " | ".join(map(_cell, row)) + " |" for row in table.itertuples(index=False))])


def _cell(value: Any) -> str:
    if value is None or value != value:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
