"""The folder of task data: its `tasks.py` loads and scores, and nothing of its text is ours.

`tasks.py` has TASKS (names), `load(task, split)` with split train or test, which gives items with `prompt`, `target`
and whatever the scorer reads, and `score(task, text, item)`, a mapping whose first value is the headline score.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from lorazor.features.errors import InputError

LOADED = ("train", "test")


@cache
def task_module(folder: Path) -> ModuleType:
    """`tasks.py` of a data folder; InputError when it is missing or does not load."""
    path = folder / "tasks.py"
    spec = importlib.util.spec_from_file_location("lorazor_study_tasks", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise InputError(f"{folder} is no folder of task data: it has no tasks.py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # importing runs the file, which may fail in any way
        raise InputError(f"{path} does not load ({type(error).__name__}: {error})") from error
    for name in ("TASKS", "load", "score"):
        if not hasattr(module, name):
            raise InputError(f"{path} has no {name}")
    return module


def load_items(folder: Path, task: str) -> list[dict[str, Any]]:
    """Every item of a task, of both splits: ours are made by prompt, whatever the data set's are."""
    module = task_module(folder)
    try:
        return [item for split in LOADED for item in module.load(task, split)]
    except OSError as error:
        raise InputError(f"task {task!r}: {error}") from None


def score(text: str, example: dict[str, Any], *, folder: str, task: str) -> float:
    """The headline score of `task`, as a scorer of `lorazor collect`."""
    scores = task_module(Path(folder)).score(task, text, example)
    return float(next(iter(scores.values())))
