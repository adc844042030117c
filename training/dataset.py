"""The requests of a training run as replay tables: one table per task of all of them, and one per part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lorazor.features.errors import InputError
from lorazor.training.labels import safe
from lorazor.training.replay import Bools, LeftOut, ReplayTable
from lorazor.training.split import Split, split_requests
from lorazor.training.traces import TraceSet

Tables = Mapping[str, ReplayTable]
LEAST_REQUESTS = 5
"""Training requests with a decision: fewer teach nothing."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Replay tables by task, `whole` and for each part; `mean_output_tokens` is that of the training requests alone."""

    whole: Tables
    train: Tables
    validation: Tables
    test: Tables
    mean_output_tokens: dict[str, float]
    left_out: dict[str, LeftOut]
    split: Split

    @property
    def unseen(self) -> Tables:
        """The validation and test requests, from which no policy learns before it is refitted."""
        return {task: _with_ids(table, self.split.validation | self.split.test) for task, table in self.whole.items()}


def prepare(traces: TraceSet, *, seed: int) -> Dataset:
    """Split the requests, then build the tables; InputError when there is too little or one class only to learn."""
    split = split_requests(traces.requests, seed=seed)
    means, whole = {}, {}
    for task in traces.tasks:
        requests = traces.requests[traces.requests["task"] == task]
        trained = requests["request_id"].isin(split.train)
        means[task] = float(requests.loc[trained, "length"].mean())
        whole[task] = ReplayTable.from_traces(traces, task, means[task])
    train, validation, test = (
        {task: _with_ids(table, ids) for task, table in whole.items()}
        for ids in (split.train, split.validation, split.test)
    )
    _refuse_unlearnable(train)
    left_out = {task: table.left_out for task, table in whole.items()}
    return Dataset(whole, train, validation, test, means, left_out, split)


def _with_ids(table: ReplayTable, ids: frozenset[str]) -> ReplayTable:
    return table.subset(np.array([i in ids for i in table.request_id], dtype=np.bool_))


def stack(tables: Tables) -> tuple[npt.NDArray[np.float32], Bools]:
    """Features [D, F] and safe labels [D] of all tasks, one task after the other."""
    return (
        np.concatenate([table.features for table in tables.values()]),
        np.concatenate([safe(table) for table in tables.values()]),
    )


def _refuse_unlearnable(train: Tables) -> None:
    labels = {task: safe(table) for task, table in train.items()}
    pooled = np.concatenate(list(labels.values()))
    names = ", ".join(repr(task) for task in train)
    if (n := sum(len(np.unique(table.request)) for table in train.values())) < LEAST_REQUESTS:
        raise InputError(
            f"task {names}: {n} training requests are long enough to have a decision; "
            f"training needs at least {LEAST_REQUESTS}"
        )
    if not pooled.any():
        raise InputError(
            f"task {names}: every label is 'unsafe' (no release keeps the score), so there is nothing to learn"
        )
    if pooled.all():
        raise InputError(
            f"task {names}: every label is 'safe' (no release lowers a score), so there is nothing to learn"
        )
