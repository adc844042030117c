"""A study's output folder with planted traces in it, as the stages before would have left it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lorazor.training.study.layout import CALIBRATE, POLICY_TRAIN, TEST, Cell, Layout
from lorazor.training.traces import TraceSet, write_traces
from tests.planted import planted_traces

SIZES = {POLICY_TRAIN: 300, CALIBRATE: 700, TEST: 300}
TASKS = """
TASKS = ("upper", "double")

def load(task, split):
    words = ["".join("abcdefgh"[int(d)] for d in f"{n:o}") for n in range(400)]
    mine = words[:300] if split == "train" else words[300:]
    pairs = [(w, w.upper() if task == "upper" else w + w) for w in mine]
    if task == "upper" and split == "train":
        pairs += [(words[0], "A second target")]
    return [{"prompt": f"{task} {w}=", "target": t, "ref": {"answer": t}} for w, t in pairs]

def score(task, text, example):
    return {"exact": float(text.strip() == example["ref"]["answer"]), "length": 0.5}
"""


def task_data(folder: Path) -> Path:
    """A folder of task data: two made-up tasks with their scorer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tasks.py").write_text(TASKS)
    return folder


def plant(out: Path, cell: Cell, seed: int = 0, sizes: dict[str, int] = SIZES, **planted: Any) -> TraceSet:
    """Write the cell's collection; all of its traces."""
    traces = renamed(planted_traces(sum(sizes.values()), seed, task=cell.task, **planted))
    folder = Layout(out).collection(cell)
    write_traces(folder / "rows", traces.steps, traces.rollouts, traces.meta)
    ids = [str(i).partition("/")[2] for i in traces.requests["request_id"]]
    parts = [part for part, size in sizes.items() for _ in range(size)]
    rows = [{"id": i, "prompt": i, "part": part} for i, part in zip(ids, parts, strict=True)]
    (folder / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return traces


def renamed(traces: TraceSet) -> TraceSet:
    """With request ids as `collect` makes them: TASK/ID."""

    def with_task(frame: pd.DataFrame) -> pd.DataFrame:
        return frame.assign(request_id=frame["task"] + "/" + frame["request_id"])

    return replace(traces, steps=with_task(traces.steps), rollouts=with_task(traces.rollouts))


def with_texts(traces: TraceSet) -> pd.DataFrame:
    """Rollouts with a text for each outcome that says what it is; null where it is the never-released one."""
    rows = traces.rollouts
    texts = [
        None if same and mode != "adapter" else f"{i} {mode} {r if mode == 'released' else ''}".strip()
        for i, mode, r, same in zip(
            rows["request_id"], rows["mode"], rows["release_step"], rows["same_text"], strict=True
        )
    ]
    return rows.assign(text=np.array(texts, object))
