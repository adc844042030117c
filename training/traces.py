"""The trace format: what `collect` and `import-traces` write, and what train, tune and evaluate read.

A folder holds `meta.json`, `steps/*.parquet` (a row per decode step of a never-released request) and
`rollouts/*.parquet` (a row per request and outcome). Folders only grow: each write is one new file, put in place
atomically, so a killed collection leaves whole files. Reading checks every rule of the format (see trace_checks.py).

In memory the tables are pandas frames with the dtypes of `STEP_COLUMNS` and `ROLLOUT_COLUMNS`, except for two columns
that can be null: `base_top1_agrees` is float32 (1, 0, or NaN for null) and `release_step` is pandas' Int32.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
from pydantic import ValidationError

from lorazor.features.errors import InputError
from lorazor.features.signals import ADAPTER_SIGNALS, PROBE_SIGNALS
from lorazor.training.provenance import atomic_path, atomic_write_text
from lorazor.training.trace_arrow import read_file, to_arrow, to_frame, write_file
from lorazor.training.trace_format import (
    FORMAT_VERSION,
    META,
    MODES,
    OPTIONAL_COLUMNS,
    ROLLOUT_COLUMNS,
    ROLLOUTS,
    SIGNAL_COLUMNS,
    STEP_COLUMNS,
    STEPS,
    AdapterInfo,
    Meta,
    Mode,
    ModelInfo,
    Noise,
    TaskInfo,
)

__all__ = [
    "ADAPTER_SIGNALS",
    "FORMAT_VERSION",
    "META",
    "MODES",
    "OPTIONAL_COLUMNS",
    "PROBE_SIGNALS",
    "ROLLOUTS",
    "ROLLOUT_COLUMNS",
    "SIGNAL_COLUMNS",
    "STEPS",
    "STEP_COLUMNS",
    "AdapterInfo",
    "Meta",
    "Mode",
    "ModelInfo",
    "Noise",
    "TaskInfo",
    "TraceSet",
    "append",
    "read_meta",
    "read_table",
    "read_traces",
    "to_arrow",
    "to_frame",
    "write_traces",
]


@dataclass(frozen=True, eq=False)
class TraceSet:
    """Traces and rollouts of one collection; `steps` is grouped by request, each in step order from 0."""

    steps: pd.DataFrame
    rollouts: pd.DataFrame
    meta: Meta

    @cached_property
    def requests(self) -> pd.DataFrame:
        """A row per request, in the order of `steps`: request_id, task, adapter, prompt_tokens, max_tokens, length."""
        columns = ["request_id", "task", "adapter", "prompt_tokens", "max_tokens"]
        starts = np.flatnonzero(self.steps["step"].to_numpy() == 0)
        frame = self.steps[columns].iloc[starts].reset_index(drop=True)
        return frame.assign(length=np.diff(np.append(starts, len(self.steps))))

    @property
    def tasks(self) -> list[str]:
        """The tasks that have requests, in order of appearance."""
        return [str(task) for task in self.requests["task"].unique()]

    def select(self, task: str) -> TraceSet:
        """The requests of one task; InputError when there is none."""
        if task not in self.tasks:
            raise InputError(f"task {task!r} has no requests in these traces (they hold: {', '.join(self.tasks)})")
        return replace(self, steps=_where(self.steps, "task", [task]), rollouts=_where(self.rollouts, "task", [task]))

    def keep(self, request_ids: Iterable[str]) -> TraceSet:
        """Only the requests with these ids (ids that are not here are ignored)."""
        wanted = list(request_ids)
        return replace(
            self,
            steps=_where(self.steps, "request_id", wanted),
            rollouts=_where(self.rollouts, "request_id", wanted),
        )

    def digest(self) -> str:
        """sha256 over the rows of both tables but for texts, from which nothing is learnt: the same data give the same
        digest, whatever files they came in."""
        total = hashlib.sha256()
        for frame in (self.steps, self.rollouts):
            columns = sorted(str(name) for name in frame.columns if name != "text")
            total.update(",".join(columns).encode())
            rows = pd.util.hash_pandas_object(frame[columns], index=False).to_numpy()
            total.update(np.sort(rows).tobytes())
        return total.hexdigest()


def _where(frame: pd.DataFrame, column: str, values: Sequence[str]) -> pd.DataFrame:
    return frame[frame[column].isin(values)].reset_index(drop=True)


def read_traces(folder: str | Path) -> TraceSet:
    """Read and check a trace folder; steps come back grouped by request (in order of first appearance) and sorted.

    Raises InputError, naming file, column and row, for anything that breaks the format or when there is no request.
    """
    from lorazor.training.trace_checks import checked

    path = Path(folder)
    meta = read_meta(path)
    return checked(read_table(path, STEPS), read_table(path, ROLLOUTS), meta, where=path)


def read_meta(folder: Path) -> Meta:
    """`meta.json` of a trace folder; InputError names the field that is wrong."""
    path = folder / META
    try:
        meta = Meta.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{folder} is not a trace folder: it has no {META}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "the file"
        raise InputError(f"{path}: {field}: {first['msg']}") from None
    if meta.format_version != FORMAT_VERSION:
        raise InputError(f"{path}: format_version is {meta.format_version}, this LoRazor reads {FORMAT_VERSION}")
    return meta


def read_table(folder: Path, kind: str) -> pd.DataFrame:
    """All files of `folder/kind` as one frame with the format's dtypes, rows as stored; `frame.attrs["files"]` lists
    (file name, rows) in order, so that a message can name the file of a row. Optional columns come back as missing.
    """
    schema = STEP_COLUMNS if kind == STEPS else ROLLOUT_COLUMNS
    tables, files = [], []
    for path in sorted((folder / kind).glob("*.parquet")):
        table = read_file(path, schema)
        tables.append(table)
        files.append((f"{kind}/{path.name}", table.num_rows))
    frame = to_frame(pa.concat_tables(tables) if tables else schema.empty_table())
    frame.attrs["files"] = files
    return frame


def write_traces(folder: str | Path, steps: pd.DataFrame, rollouts: pd.DataFrame, meta: Meta) -> None:
    """Write (or append to) a trace folder: one new file per table, `meta.json` last."""
    path = Path(folder)
    append(path, STEPS, steps)
    append(path, ROLLOUTS, rollouts)
    atomic_write_text(path / META, meta.model_dump_json(indent=2) + "\n")


def append(folder: Path, kind: str, frame: pd.DataFrame, name: str | None = None) -> Path:
    """Add one Parquet file to `folder/kind`, atomically; `name` without suffix, by default the next free number.

    Columns of the format that the frame lacks must be optional ones; they are left out of the file.
    """
    schema = STEP_COLUMNS if kind == STEPS else ROLLOUT_COLUMNS
    table = to_arrow(frame, schema)
    parts = folder / kind
    path = parts / f"{name or _next_part(parts)}.parquet"
    with atomic_path(path) as temporary:
        write_file(table, temporary)
    return path


def _next_part(parts: Path) -> str:
    taken = [int(p.stem[5:]) for p in parts.glob("part-*.parquet") if p.stem[5:].isdigit()]
    return f"part-{max(taken, default=-1) + 1:05d}"
