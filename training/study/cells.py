"""A cell's traces, by part, and its policies with a score for any request: what every stage on the CPU starts from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from lorazor.features.errors import InputError
from lorazor.training.baselines import ReleasePolicy
from lorazor.training.calibration import Scored
from lorazor.training.collect_data import read_rows
from lorazor.training.dataset import Dataset, prepare
from lorazor.training.replay import Floats, ReplayTable
from lorazor.training.study.layout import CALIBRATE, POLICY_PARTS, POLICY_TRAIN, TEST, Cell, Layout
from lorazor.training.thresholds import threshold_grid
from lorazor.training.traces import TraceSet, read_traces

REQUESTS, ROWS = "requests.jsonl", "rows"


@dataclass(frozen=True, eq=False)
class Parts:
    """The traces of one cell by part, each of one task; what training saw is in none of the others."""

    cell: Cell
    traces: Mapping[str, TraceSet]
    seed: int

    @cached_property
    def data(self) -> Dataset:
        """What a policy learns from; InputError where the labels are of one class."""
        return prepare(self.traces[POLICY_TRAIN], seed=self.seed)

    @cached_property
    def mean_output_tokens(self) -> float:
        """The task's constant, from the policy's training requests."""
        return float(self.traces[POLICY_TRAIN].requests["length"].mean())

    @cached_property
    def tables(self) -> dict[str, ReplayTable]:
        """Replay tables of the calibration and test requests."""
        try:
            mean = self.data.mean_output_tokens[self.cell.task]
        except InputError:  # one class: no policy can be learnt, and the constant is no longer read
            mean = self.mean_output_tokens
        return {p: ReplayTable.from_traces(self.traces[p], self.cell.task, mean) for p in (CALIBRATE, TEST)}


def load_parts(layout: Layout, cell: Cell, seed: int) -> Parts:
    """Read a cell.

    Raises:
        InputError: the collection did not end, or its parts are not those of a study.
    """
    folder = layout.collection(cell)
    wanted = part_ids(folder / REQUESTS, cell.task)
    traces = read_traces(folder / ROWS)
    have = set(traces.requests["request_id"])
    lacking = sum(len(ids - have) for ids in wanted.values())
    if lacking:
        raise InputError(f"{folder}: the collection lacks {lacking} requests: run the stage collect again")
    return Parts(cell, {part: traces.keep(ids) for part, ids in wanted.items()}, seed)


def part_ids(path: Path, task: str) -> dict[str, set[str]]:
    """The request ids of each part of a collection's requests."""
    found: dict[str, set[str]] = defaultdict(set)
    for row, where in read_rows(path):
        if row.get("part") not in POLICY_PARTS:
            raise InputError(f'{where}: "part" must be one of {", ".join(POLICY_PARTS)}, got {row.get("part")!r}')
        found[row["part"]].add(f"{task}/{row['id']}")
    if lacking := [part for part in POLICY_PARTS if part not in found]:
        raise InputError(f"{path}: holds no request of the part {lacking[0]}")
    return found


@dataclass(frozen=True, eq=False)
class Rated:
    """A policy with its scores on the calibration and test requests, and the grid that `tune` would walk."""

    name: str
    grid: Floats
    calibrate: Scored
    test: Scored


def rate(policy: ReleasePolicy, parts: Parts) -> Rated:
    """Score the cell's requests as `lorazor train` has it: by what all of its training requests taught.

    The grid comes from those of them that the policy had not seen at first, as scored then.
    """
    unseen = parts.data.unseen[parts.cell.task]
    grid = threshold_grid(unseen, policy.score(unseen))
    score = policy.refit() if policy.refit else policy.score
    calibrate, test = (Scored(table, score(table)) for table in parts.tables.values())
    return Rated(policy.name, np.array(grid, dtype=np.float64), calibrate, test)
