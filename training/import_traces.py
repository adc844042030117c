"""`lorazor import-traces`: tables that somebody else recorded, checked and written as a standard trace folder.

The tables have the columns of traces.py and come as Parquet, CSV (with a header) or JSONL: files whose names start
with `steps` and `rollouts`, or folders of those names. What is wrong is told by file, column and row (counted from 0
in its file), up to ten problems at once, so that a table is mended in few rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from lorazor.features.errors import InputError
from lorazor.features.grid import release_grid
from lorazor.policy.fingerprint import fingerprint
from lorazor.training.import_tables import Problems, read_foreign
from lorazor.training.provenance import atomic_folder, command_line, versions
from lorazor.training.trace_checks import checked
from lorazor.training.traces import (
    META,
    ROLLOUTS,
    STEPS,
    AdapterInfo,
    Meta,
    ModelInfo,
    TaskInfo,
    TraceSet,
    read_meta,
    write_traces,
)

UNKNOWN = "unknown"


@dataclass(frozen=True)
class ImportReport:
    """What was imported. Rollouts off the release grid are kept and never used; missing ones cannot be picked."""

    folder: Path
    requests: dict[str, int]
    steps: int
    rollouts: int
    off_grid: int
    missing: int

    def render(self) -> str:
        """A few lines for the terminal."""
        tasks = ", ".join(f"{name}: {count} requests" for name, count in self.requests.items())
        lines = [f"{self.folder}: {tasks}; {self.steps:,} step rows, {self.rollouts:,} rollouts"]
        if self.off_grid:
            lines.append(f"{self.off_grid} rollouts are not on the release grid and will not be used")
        if self.missing:
            lines.append(f"{self.missing} steps of the release grid have no rollout: no policy will release there")
        return "\n".join(lines)


def import_traces(
    source: str | Path,
    out_dir: str | Path,
    *,
    base: str | Path | None = None,
    adapters: Mapping[str, str | Path] | None = None,
    probe_interval: int | None = None,
    sampled: bool = False,
) -> ImportReport:
    """Check the tables in `source` and write them to `out_dir` in the standard form.

    Args:
        source: a folder with the tables; a `meta.json` in it makes the other arguments needless.
        out_dir: a new or empty folder.
        base: the base model's folder, for its fingerprint.
        adapters: served name -> the adapter's folder, for its fingerprint; every adapter of the tables is needed.
        probe_interval: g of the recording.
        sampled: whether the texts were drawn with a temperature (tune then uses the signed loss).

    Raises:
        InputError: up to ten lines, one for each problem found.
    """
    folder, target = Path(source), Path(out_dir)
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"{target} is not empty: give another folder")
    problems = Problems()
    steps, rollouts = read_foreign(folder, STEPS, problems), read_foreign(folder, ROLLOUTS, problems)
    problems.stop()
    given = {"base": base, "adapters": adapters or None, "probe_interval": probe_interval}
    if (folder / META).exists():
        if extra := [name for name, value in given.items() if value is not None]:
            raise InputError(f"{folder / META} says it already: drop {', '.join(extra)}")
        meta = read_meta(folder)
    else:
        meta = _make_meta(steps, base, adapters or {}, probe_interval, sampled)
    problems.check_structure(steps, rollouts, meta)
    traces = checked(steps, rollouts, meta, where=folder)
    with atomic_folder(target) as temporary:
        write_traces(temporary, traces.steps, traces.rollouts, meta)
    return _report(traces, target)


def _make_meta(
    steps: pd.DataFrame,
    base: str | Path | None,
    adapters: Mapping[str, str | Path],
    probe_interval: int | None,
    sampled: bool,
) -> Meta:
    if base is None or probe_interval is None:
        raise InputError(f"there is no {META} beside the tables, so base, adapters and probe_interval are needed")
    if probe_interval < 1:
        raise InputError(f"probe_interval must be 1 or more, got {probe_interval}")
    served = steps.groupby(["task", "adapter"], sort=False)["max_tokens"].max().reset_index()
    for name in served["adapter"]:
        if name not in adapters:
            raise InputError(f'column adapter holds "{name}", whose folder is not given (given: {[*adapters]})')
    prints = {name: fingerprint(adapters[name]) for name in set(served["adapter"])}
    pairs = list(zip(served["task"], served["adapter"], served["max_tokens"], strict=True))
    return Meta(
        base=ModelInfo(name=Path(base).resolve().name, fingerprint=fingerprint(base)),
        adapters=[AdapterInfo(name=adapter, fingerprint=prints[adapter], task=task) for task, adapter, _ in pairs],
        probe_interval=probe_interval,
        tasks={task: TaskInfo(max_tokens=int(most), scorer=UNKNOWN) for task, _, most in pairs},
        versions=versions(),
        command=command_line(),
        greedy=not sampled,
    )


def _report(traces: TraceSet, folder: Path) -> ImportReport:
    released = traces.rollouts[traces.rollouts["mode"] == "released"]
    have = set(zip(released["request_id"], released["release_step"].astype(int), strict=True))
    requests = traces.requests
    lengths = zip(requests["request_id"], requests["length"], strict=True)
    grid = {(name, r) for name, length in lengths for r in release_grid(int(length), traces.meta.probe_interval)}
    counts = {str(task): int(count) for task, count in requests["task"].value_counts(sort=False).items()}
    return ImportReport(folder, counts, len(traces.steps), len(traces.rollouts), len(have - grid), len(grid - have))
