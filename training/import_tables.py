"""Foreign tables: reading Parquet, CSV and JSONL into the format's types, and collecting what is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from lorazor.features.errors import InputError
from lorazor.training import trace_checks
from lorazor.training.traces import OPTIONAL_COLUMNS, ROLLOUT_COLUMNS, ROLLOUTS, STEP_COLUMNS, STEPS, Meta, to_frame

MAX_PROBLEMS = 10
MAX_PER_COLUMN = 3  # so that one bad column does not hide the others
TRUE, FALSE = {"true", "1", "1.0"}, {"false", "0", "0.0"}
NULL = {"", "null", "none", "nan", "<na>"}
INT32 = np.iinfo(np.int32)


@dataclass
class Problems:
    """What is wrong so far, one line each."""

    lines: list[str] = field(default_factory=list)

    def add(self, line: str) -> None:
        """Note a problem; the eleventh and later ones are only counted."""
        self.lines.append(line)

    def stop(self) -> None:
        """InputError with the first ten lines, if there is any."""
        if self.lines:
            more = len(self.lines) - MAX_PROBLEMS
            tail = [f"… and {more} more"] if more > 0 else []
            raise InputError("\n".join([*self.lines[:MAX_PROBLEMS], *tail]))

    def check_structure(self, steps: pd.DataFrame, rollouts: pd.DataFrame, meta: Meta) -> None:
        """Every rule of trace_checks.py, a stage at a time: a later stage supposes that the earlier ones held."""
        if steps.empty:
            self.add("steps: there are no rows, so there is nothing to learn from")
        self.stop()
        s, r = _Collecting(steps, STEPS, None, self), _Collecting(rollouts, ROLLOUTS, None, self)
        for table in (s, r):
            trace_checks._check_values(table)
        self.stop()
        ids = pd.Index(steps["request_id"].unique())
        code = ids.get_indexer(steps["request_id"]).astype(np.int64)
        order = np.lexsort((steps["step"].to_numpy(np.int64), code))
        trace_checks._check_steps(s, code, order, meta)
        unknown = ~rollouts["request_id"].isin(ids).to_numpy()
        r.refuse(unknown, "request_id", "must be a request of the steps table")
        self.stop()
        length = np.bincount(code)
        try:
            trace_checks._check_rollouts(r, ids, length, steps.iloc[order[np.cumsum(length) - length]])
        except InputError as error:
            self.add(str(error))
        self.stop()


@dataclass(frozen=True)
class _Collecting(trace_checks._Table):
    """A table whose broken rules are noted, a few rows each, where its base class stops at the first."""

    problems: Problems

    def refuse(self, bad: Any, column: str, rule: str) -> None:
        """Note the first rows of `bad`."""
        for row in np.flatnonzero(bad)[:MAX_PER_COLUMN]:
            self._note(int(row), column, rule)

    def fail(self, row: int, column: str, rule: str) -> NoReturn:  # type: ignore[misc]
        """Note the row."""
        self._note(row, column, rule)

    def _note(self, row: int, column: str, rule: str) -> None:
        try:
            super().fail(row, column, rule)
        except InputError as error:
            self.problems.add(str(error))


def read_foreign(folder: Path, kind: str, problems: Problems) -> pd.DataFrame:
    """All tables of a kind (`steps` or `rollouts`) as one frame with the format's dtypes; problems are noted.

    `frame.attrs["files"]` lists (file, rows) in order, as `trace_checks` wants it. The frame is of no use once there
    is a problem.
    """
    schema = STEP_COLUMNS if kind == STEPS else ROLLOUT_COLUMNS
    frames, files = [], []
    for path in _table_files(folder, kind):
        raw = _read(path)
        frames.append(_typed(raw, schema, path, problems))
        files.append((str(path), len(raw)))
    frame = to_frame(pa.concat_tables(frames)) if frames else to_frame(schema.empty_table())
    if not frames:
        problems.add(f"{folder}: there is no {kind} table ({kind}*.parquet, .csv or .jsonl, or a folder {kind}/)")
    frame.attrs["files"] = files
    return frame


def _table_files(folder: Path, kind: str) -> list[Path]:
    found = [*folder.glob(f"{kind}*"), *(folder / kind).glob("*")]
    return sorted(path for path in found if path.is_file() and path.suffix in _READERS)


def _read_jsonl(path: Path) -> pd.DataFrame:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n")):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InputError(f"{path}: line {number + 1} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise InputError(f"{path}: line {number + 1} must be an object, got {type(row).__name__}")
        rows.append(row)
    return pd.DataFrame(rows, dtype=object)


_READERS = {
    ".parquet": lambda path: pq.read_table(path).to_pandas(types_mapper=pd.ArrowDtype),
    ".csv": lambda path: pd.read_csv(path, dtype=str, keep_default_na=False),
    ".jsonl": _read_jsonl,
}


def _read(path: Path) -> pd.DataFrame:
    try:
        return _READERS[path.suffix](path)  # type: ignore[no-any-return]
    except InputError:
        raise
    except (OSError, ValueError, pa.ArrowException) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"{path} is not a readable {path.suffix[1:]} table: {reason}") from None


def _typed(raw: pd.DataFrame, schema: Any, path: Path, problems: Problems) -> Any:
    """The columns of one file as an Arrow table of `schema`."""
    for column in raw.columns:
        if column not in schema.names:
            problems.add(f"{path}: column {column} is not part of the format")
    columns = []
    for expected in schema:
        if expected.name in raw.columns:
            columns.append(_column(raw[expected.name], expected, path, problems))
            continue
        if expected.name not in OPTIONAL_COLUMNS:
            problems.add(f"{path}: column {expected.name} is missing")
        empty = pa.nulls(len(raw), expected.type)
        columns.append(empty.fill_null(False) if expected.name == "differs" else empty)
    return pa.table(columns, schema=schema)


def _column(raw: pd.Series[Any], expected: Any, path: Path, problems: Problems) -> Any:
    """One column as an Arrow array of the expected type; an Arrow column of the right kind is cast as a whole."""
    if isinstance(raw.dtype, pd.ArrowDtype) and _SAME_KIND[expected.type](raw.dtype.pyarrow_dtype):
        try:
            return pa.chunked_array(pa.array(raw.array)).cast(expected.type, safe=expected.type != pa.float32())
        except pa.ArrowException:
            pass  # some value does not fit: find out which
    values, bad = _convert(raw, expected.type)
    for row in np.flatnonzero(bad)[:MAX_PER_COLUMN]:
        problems.add(f"{path}: column {expected.name}, row {row}: must be {expected.type}, is {raw.iloc[row]!r}")
    return pa.array(values, type=expected.type)


def _convert(raw: pd.Series[Any], kind: Any) -> tuple[list[Any], Any]:
    """The values as Python objects that Arrow takes for `kind` (None where null), and which of them do not fit."""
    plain = raw.astype(object)
    null = plain.isna().to_numpy(bool, copy=True)
    if not pa.types.is_string(kind):
        null |= plain.map(lambda value: isinstance(value, str) and value.strip().lower() in NULL).to_numpy(bool)
    convert = _CONVERTERS[kind]
    values = [None if empty else convert(value) for value, empty in zip(plain, null, strict=True)]
    bad = np.array([value is None for value in values], bool) & ~null
    return values, bad


def _to_text(value: Any) -> str | None:
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) and value != "" else None


def _to_int(value: Any) -> int | None:
    number = _to_float(value)
    return int(number) if number is not None and number % 1 == 0 and INT32.min <= number <= INT32.max else None


def _to_float(value: Any) -> float | None:
    if isinstance(value, bool | np.bool_):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _to_bool(value: Any) -> bool | None:
    text = str(value).strip().lower()
    return text in TRUE if text in TRUE | FALSE else None


_CONVERTERS = {pa.string(): _to_text, pa.int32(): _to_int, pa.float32(): _to_float, pa.bool_(): _to_bool}
_SAME_KIND: dict[Any, Callable[[Any], bool]] = {
    pa.string(): lambda kind: pa.types.is_string(kind) or pa.types.is_large_string(kind),
    pa.int32(): pa.types.is_integer,
    pa.float32(): pa.types.is_floating,
    pa.bool_(): pa.types.is_boolean,
}
