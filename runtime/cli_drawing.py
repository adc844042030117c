"""The score of a policy over single requests of a trace folder, drawn as text for `lorazor inspect`."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lorazor.features.errors import InputError
from lorazor.policy.inspect import draw_score
from lorazor.training.calibration import Scored, calibration


def drawings(policy: str, traces: Path, request: str | None) -> Iterator[str]:
    """A chart of one request, or of the first request of each task, under a line that names it.

    Raises:
        InputError: policy and traces do not fit, or no such request is in them.
    """
    data = calibration(policy, traces)
    found = False
    for name, scored in data.tasks.items():
        ids = list(scored.table.request_id)
        if request is not None and request not in ids:
            continue
        found = True
        row = 0 if request is None else ids.index(request)
        yield _drawing(name, scored, row, data.artifact.manifest.tasks[name].threshold)
    if not found:
        raise InputError(f"request {request!r} is not in {traces}, or its task is unknown to the policy")


def _drawing(task: str, scored: Scored, row: int, threshold: float | None) -> str:
    table = scored.table
    part = slice(int(table.first[row]), int(table.first[row + 1]))
    head = f"request {table.request_id[row]}, task {task}, {int(table.length[row])} tokens never released"
    return f"{head}\n{draw_score(table.step[part], np.asarray(scored.scores[part]), threshold)}"
