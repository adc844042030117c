"""The tables of the report, each made from the rows of one CSV file."""

from __future__ import annotations

from typing import Any

import pandas as pd
from scipy import stats

from lorazor.training.learned import LEARNED
from lorazor.training.study.numbers import SOLVED
from lorazor.training.study.policies import PROMPT_ONLY

CELL = ["backbone", "task", "adapter"]
LIMIT = ["loss_kind", "max_drop"]
SIGNIFICANT = 0.05


def split_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Per task, the distinct prompts of each part."""
    return rows.pivot(index="task", columns="part", values="prompts").reset_index()


def curve_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Per adapter, the step that was kept, the last one, and what validation gave at the kept one."""
    kept = rows[rows["best"].astype(bool)].assign(metric=rows["metric"].str.removeprefix("eval_"))
    found = kept.pivot_table(index=[*CELL, "step"], columns="metric", values="value").reset_index()
    last = rows.groupby(CELL)["step"].max().rename("last step").reset_index()
    return last.merge(found.rename(columns={"step": "kept step"}), on=CELL)


def prompt_only_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Per cell, over all requests: the scores of both ends and what r = 1 keeps."""
    columns = [*CELL, "n", "q_base", "q_adapter", "q_policy", "drop", "retention", "length_ratio"]
    found = rows[(rows["policy"] == PROMPT_ONLY) & (rows["scope"] != SOLVED)][columns]
    return found.rename(columns={"q_policy": "q_prompt_only"})


def policy_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Per cell, policy and max-drop, judged over the requests with S > 0."""
    columns = ["policy", *LIMIT, "threshold", "n", "q_base", "q_adapter", "q_policy", "drop"]
    columns += ["active_row_share", "length_ratio", "retention", "oracle_gap"]
    return _tuned(rows).reindex(columns=[*CELL, *columns])


def mean_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Per kind of adapter, limit and policy, means over tasks and backbones; never releasing counts as no drop."""
    groups = _tuned(rows).groupby(["adapter", *LIMIT, "policy"], sort=False)
    means = groups[["drop", "active_row_share", "oracle_gap"]].mean()
    means.insert(0, "cells", groups.size())
    return means.reset_index()


def _tuned(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of tuned policies over S > 0; none where no cell could learn, which leaves columns out."""
    needed = (*LIMIT, "threshold", "oracle_gap")
    rows = rows.reindex(columns=list(dict.fromkeys([*rows.columns, *needed])))
    return rows[(rows["scope"] == SOLVED) & rows["max_drop"].notna()]


def above_bound(rows: pd.DataFrame) -> pd.DataFrame:
    """Per limit: how many cells of the learnt policy are significantly above it, and whether that is too many."""
    found = rows[(rows["policy"] == LEARNED) & (rows["scope"] != SOLVED)]
    made: list[dict[str, Any]] = []
    for (kind, max_drop), part in found.groupby(LIMIT, sort=False) if len(found) else ():
        row: dict[str, Any] = {"loss_kind": kind, "max_drop": max_drop, "cells": len(part)}
        for what in ("drop", "loss") if kind == "relative" else ("drop",):
            count = int((part[f"p_{what}_above"] < SIGNIFICANT).sum())
            chance = 1 - float(part["confidence"].iloc[0])
            p = stats.binomtest(count, len(part), chance, alternative="greater").pvalue
            row |= {f"{what} above": count, f"{what}: p of so many": float(p)}
        made.append(row)
    return pd.DataFrame(made)


def ablation_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Per limit and variant, means over the cells that have it; `note` where a variant could not be made."""
    if "scope" not in rows:
        return rows
    groups = rows[rows["scope"] == SOLVED].groupby([*LIMIT, "variant"], sort=False)
    found = groups[["active_row_share", "drop"]].mean()
    found.insert(0, "cells", groups.size())
    return found.reset_index().sort_values(LIMIT, kind="stable")


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


def since_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Per cell, limit and number of tokens since the release, with retention's band."""
    columns = [*LIMIT, "tokens_from", "tokens_to", "n", "q_base", "q_adapter", "q_policy"]
    return rows.reindex(columns=[*CELL, *columns, "retention", "retention_low", "retention_high"])


def text_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Per cell and way to answer, counts and shares of the outputs that keep their format and of those that refuse."""
    rows = rows.assign(**{"in format": rows["format"] / rows["n"], "refused": rows["refusals"] / rows["n"]})
    return rows.reindex(columns=[*CELL, "way", *LIMIT, "n", "released", "format", "in format", "refusals", "refused"])
