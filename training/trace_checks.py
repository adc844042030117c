"""The rules of the trace format, checked on whole columns: what is wrong is told by file, column and row.

Rows are counted from 0 within their file. A table that was made in memory has no file; its name stands in.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt
import pandas as pd

from lorazor.features.errors import InputError
from lorazor.training.traces import MODES, PROBE_SIGNALS, ROLLOUTS, STEPS, Meta, TraceSet

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
PER_REQUEST = ("task", "adapter", "prompt_tokens", "max_tokens")
RANGES = {
    "step": (0, np.inf),
    "token_id": (0, np.inf),
    "prompt_tokens": (1, np.inf),
    "max_tokens": (1, np.inf),
    "output_tokens": (0, np.inf),
    "score": (0.0, 1.0),
    # Signals are float32 sums: a little beyond the exact bound is rounding.
    "entropy": (-1e-3, np.inf),
    "top1_prob": (0.0, 1.001),
    "margin": (0.0, 1.001),
    "token_logprob": (-np.inf, 1e-3),
    "kl": (-1e-2, np.inf),
    "js": (-1e-2, 0.7),
    "base_token_logprob": (-np.inf, 1e-3),
    "base_entropy": (-1e-3, np.inf),
}
MAY_BE_NULL = frozenset(RANGES) - {"step", "token_id", "prompt_tokens", "max_tokens", "output_tokens", "score"}


@dataclass(frozen=True)
class _Table:
    """A frame with where it came from, for messages."""

    frame: pd.DataFrame
    kind: str
    where: Path | None

    def refuse(self, bad: Bools, column: str, rule: str) -> None:
        """InputError for the first row of `bad`, if there is one."""
        if bad.any():
            self.fail(int(np.argmax(bad)), column, rule)

    def fail(self, row: int, column: str, rule: str) -> NoReturn:
        value, file, at = self.frame[column].iloc[row], self.kind, row
        for name, rows in self.frame.attrs.get("files", ()):
            if at < rows:
                file = str(self.where / name) if self.where else name
                break
            at -= rows
        shown = "null" if pd.isna(value) else repr(value) if isinstance(value, str) else str(value)
        raise InputError(f"{file}: column {column}, row {at}: {rule}, is {shown}")


def checked(steps: pd.DataFrame, rollouts: pd.DataFrame, meta: Meta, where: Path | None = None) -> TraceSet:
    """The tables as a `TraceSet` in order, or InputError; `where` is the folder that they were read from."""
    if steps.empty:
        raise InputError(f"{where or 'traces'}: there are no step rows, so there is nothing to learn from")
    s, r = _Table(steps, STEPS, where), _Table(rollouts, ROLLOUTS, where)
    for table in (s, r):
        _check_values(table)
    ids = pd.Index(steps["request_id"].unique())
    code: Ints = ids.get_indexer(pd.Index(steps["request_id"])).astype(np.int64)
    order = _order(code, steps["step"].to_numpy(np.int64))
    _check_steps(s, code, order, meta)
    length = np.bincount(code)
    _check_rollouts(r, ids, length, steps.iloc[order[np.cumsum(length) - length]])
    if not np.array_equal(order, np.arange(len(order))):
        steps = steps.iloc[order].reset_index(drop=True)
    return TraceSet(steps, rollouts, meta)


def _order(code: Ints, step: Ints) -> Ints:
    in_order = ((code[1:] > code[:-1]) | ((code[1:] == code[:-1]) & (step[1:] > step[:-1]))).all()
    return np.arange(len(code)) if in_order else np.lexsort((step, code))


def _check_values(table: _Table) -> None:
    """Null and range rules that look at one column alone."""
    frame = table.frame
    for column in frame.columns:
        if column in ("base_top1_agrees", "release_step", "text"):
            continue
        values = frame[column]
        if column not in MAY_BE_NULL and values.isna().any():
            table.refuse(values.isna().to_numpy(), column, "must not be null")
        if column in RANGES:
            low, high = RANGES[column]
            plain = values.to_numpy(dtype=np.float64, na_value=np.nan)
            table.refuse((plain < low) | (plain > high), column, f"must be in [{low:g}, {high:g}]")


def _check_steps(table: _Table, code: Ints, order: Ints, meta: Meta) -> None:
    steps = table.frame
    step = steps["step"].to_numpy(np.int64)
    length = np.bincount(code)
    start = np.cumsum(length) - length
    expected = np.empty(len(step), np.int64)
    expected[order] = np.arange(len(step)) - np.repeat(start, length)
    if (wrong := step != expected).any():
        row = int(order[np.argmax(wrong[order])])
        rule = (
            f"steps of request {steps['request_id'].iloc[row]!r} must run 0, 1, 2, …; here {expected[row]} must follow"
        )
        table.fail(row, "step", rule)
    heads = order[start][code]
    for column in PER_REQUEST:
        values = pd.factorize(steps[column])[0]
        table.refuse(values != values[heads], column, "must be the same in every row of a request")
    limit = steps["max_tokens"].to_numpy(np.int64)
    table.refuse(step >= limit, "step", "must be below max_tokens")
    probed, g = steps["probed"].to_numpy(np.bool_), meta.probe_interval
    due = (step == 1) | ((step > 0) & (step % g == 0))
    table.refuse(probed != due, "probed", f"must be true exactly at step 1 and the multiples of g = {g}")
    for column in PROBE_SIGNALS:
        if column in steps.columns:
            table.refuse(~probed & steps[column].notna().to_numpy(), column, "must be null where probed is false")
    table.refuse(
        ~steps["task"].isin(list(meta.tasks)).to_numpy(), "task", f"must be one of meta.json's {[*meta.tasks]}"
    )
    names = [a.name for a in meta.adapters]
    table.refuse(~steps["adapter"].isin(names).to_numpy(), "adapter", f"must be one of meta.json's {names}")


def _check_rollouts(table: _Table, ids: pd.Index[str], length: Ints, heads: pd.DataFrame) -> None:
    """Rollouts belong to a traced request, are unique, and every request has its adapter's and its base's."""
    frame = table.frame
    code: Ints = ids.get_indexer(pd.Index(frame["request_id"])).astype(np.int64)
    table.refuse(code < 0, "request_id", "must be a request of the steps table")
    for column in ("task", "adapter"):
        table.refuse(
            frame[column].to_numpy(object) != heads[column].to_numpy(object)[code], column, "must match the steps table"
        )
    mode = frame["mode"].to_numpy(object)
    table.refuse(~frame["mode"].isin(MODES).to_numpy(), "mode", f"must be one of {list(MODES)}")
    released, null = mode == "released", frame["release_step"].isna().to_numpy()
    table.refuse(~released & ~null, "release_step", 'must be null unless mode is "released"')
    release = frame["release_step"].to_numpy(dtype=np.int64, na_value=0)
    table.refuse(released & (release < 1), "release_step", "must be 1 or more")
    table.refuse(
        frame.duplicated(["request_id", "mode", "release_step"]).to_numpy(),
        "request_id",
        "must be unique per mode and release_step",
    )
    for needed in ("adapter", "base"):
        has = np.bincount(code[mode == needed], minlength=len(ids))
        if not has.all():
            lacking = ids[int(np.argmin(has))]
            raise InputError(
                f"{table.where or 'traces'}: {ROLLOUTS}: request {lacking!r} has no row of mode {needed!r}"
            )
    output = frame["output_tokens"].to_numpy(np.int64)
    table.refuse(
        (mode == "adapter") & (output != length[code]),
        "output_tokens",
        "must equal the number of the request's step rows where mode is adapter",
    )
