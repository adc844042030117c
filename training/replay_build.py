"""From trace tables to a `ReplayTable`: the one place where decisions, features and rollouts are joined."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd

from lorazor.features.errors import InputError
from lorazor.features.offline import decision_features
from lorazor.training.replay import Bools, Floats, Ints, LeftOut, ReplayTable
from lorazor.training.traces import ADAPTER_SIGNALS, PROBE_SIGNALS, TraceSet


def build(traces: TraceSet, task: str, mean_output_tokens: float) -> ReplayTable:
    """See `ReplayTable.from_traces`."""
    traces = traces.select(task)
    requests, g = traces.requests, traces.meta.probe_interval
    ids = requests["request_id"].to_numpy(dtype=object)
    length, prompt, limit = (requests[c].to_numpy(np.int64) for c in ("length", "prompt_tokens", "max_tokens"))
    made = decision_features(
        _signals(traces.steps, ADAPTER_SIGNALS),
        _signals(traces.steps, PROBE_SIGNALS),
        length,
        prompt,
        limit,
        mean_output_tokens,
        g,
    )
    request, step = made.request, made.step
    rollouts = _Rollouts(traces.rollouts, ids)
    adapter, base = rollouts.of_mode("adapter", task), rollouts.of_mode("base", task)
    row, left_out = rollouts.released(request, np.where(step == 0, 1, step + 2))
    kept = row >= 0
    return ReplayTable(
        task=task,
        probe_interval=g,
        request_id=ids,
        score=rollouts.score[adapter],
        base_score=rollouts.score[base],
        length=length,
        base_tokens=rollouts.tokens[base],
        max_tokens=limit,
        first=np.searchsorted(request[kept], np.arange(len(ids) + 1)).astype(np.int64),
        step=step[kept].astype(np.int64),
        features=made.features[kept],
        released_score=rollouts.score[row[kept]],
        released_tokens=rollouts.tokens[row[kept]],
        same_text=rollouts.same_text[row[kept]],
        left_out=left_out,
    )


def _signals(steps: pd.DataFrame, names: tuple[str, ...]) -> npt.NDArray[np.float32]:
    """float32 [N, len(names)]; a column that was dropped is all missing."""
    out = np.full((len(steps), len(names)), np.nan, dtype=np.float32)
    for i, name in enumerate(names):
        if name in steps.columns:
            out[:, i] = steps[name].to_numpy(dtype=np.float32, na_value=np.nan)
    return out


class _Rollouts:
    """The rollout table as arrays, with look-ups by request and release step."""

    def __init__(self, frame: pd.DataFrame, ids: npt.NDArray[np.object_]) -> None:
        self.mode = frame["mode"].to_numpy(dtype=object)
        self.request: Ints = pd.Index(ids).get_indexer(pd.Index(frame["request_id"])).astype(np.int64)
        self.step: Ints = frame["release_step"].to_numpy(dtype=np.int64, na_value=0)
        self.score: Floats = frame["score"].to_numpy(np.float32).astype(np.float64)
        self.tokens: Ints = frame["output_tokens"].to_numpy(np.int64)
        self.same_text: Bools = frame["same_text"].to_numpy(np.bool_)
        marked = frame["differs"].to_numpy(np.bool_) if "differs" in frame.columns else np.zeros(len(frame), np.bool_)
        self.differs: Bools = marked
        self.n = len(ids)
        self.ids = ids

    def of_mode(self, mode: str, task: str) -> Ints:
        """[n] the row of each request's only rollout in `mode`."""
        rows = np.flatnonzero((self.mode == mode) & (self.request >= 0))
        found = np.full(self.n, -1, dtype=np.int64)
        found[self.request[rows]] = rows
        if (found < 0).any():
            lacking = self.ids[int(np.argmin(found))]
            raise InputError(f"task {task!r}: request {lacking!r} has no {mode!r} rollout")
        return found

    def released(self, request: Ints, release: Ints) -> tuple[Ints, LeftOut]:
        """[D] the row of each decision's rollout, -1 where it is left out; and the counts of those."""
        rows = np.flatnonzero((self.mode == "released") & (self.request >= 0))
        width = max(int(release.max(initial=0)), int(self.step[rows].max(initial=0))) + 1
        keys = self.request[rows] * width + self.step[rows]
        order = np.argsort(keys, kind="stable")
        keys, rows = keys[order], rows[order]
        wanted = request.astype(np.int64) * width + release
        at = np.minimum(np.searchsorted(keys, wanted), max(len(keys) - 1, 0))
        found = keys[at] == wanted if len(keys) else np.zeros(len(wanted), np.bool_)
        row = np.where(found, rows[at] if len(rows) else -1, -1)
        differs = found & self.differs[row]
        left_out = LeftOut(differs=int(differs.sum()), missing=int((~found).sum()))
        return np.where(differs, -1, row), left_out
