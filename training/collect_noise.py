"""The noise floor of a collection: never released against never released under another batch size.

Floating-point sums depend on the batch, so a near-tie between two tokens may fall either way. What that alone does to
the scores is measured here; `tune` refuses a max-drop below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from lorazor.training.collect_data import Task
from lorazor.training.collect_engine import Engine, Output
from lorazor.training.collect_shard import Meter, Prompted, make_run
from lorazor.training.config import NoiseConfig
from lorazor.training.traces import Noise


def sample(items: Sequence[Any], count: int) -> list[Any]:
    """At most `count` items, evenly spread over the sequence, in order."""
    picks = np.unique(np.linspace(0, len(items) - 1, min(count, len(items))).astype(int)).tolist()
    return [items[k] for k in picks]


def measure_noise(
    engine: Engine,
    task: Task,
    items: Sequence[Prompted],
    steps: pd.DataFrame,
    rollouts: pd.DataFrame,
    config: NoiseConfig,
    meter: Meter,
) -> Noise:
    """Run a sample of the requests again, `config.concurrency` at a time, and compare with what is in the tables.

    `steps` and `rollouts` are the task's rows; `differing` counts requests whose tokens are not the same.
    """
    scores = rollouts[rollouts["mode"] == "adapter"].set_index("request_id")["score"]
    tokens = steps.groupby("request_id", sort=False)["token_id"]
    chosen = sample(items, config.requests)
    again = _run_few(engine, task, chosen, config.concurrency, meter)
    differing, moved = 0, 0.0
    for item, output in zip(chosen, again, strict=True):
        request = item.request
        differing += tuple(tokens.get_group(request.id)) != output.tokens
        score = np.float32(task.scorer(output.text, request.row, request.id))  # the table's precision
        moved += abs(float(score) - float(scores[request.id]))
    return Noise(n=len(chosen), differing=differing, mean_abs_diff=moved / max(1, len(chosen)))


def _run_few(engine: Engine, task: Task, items: Sequence[Prompted], concurrency: int, meter: Meter) -> list[Output]:
    """Never-released runs of the items with at most `concurrency` of them in the engine."""
    engine.reset()
    waiting = [
        make_run(f"noise.{task.name}.{k}.never.1", item, task, task.config.adapter, "never")
        for k, item in enumerate(items)
    ]
    order = [run.key for run in waiting]
    running, done = 0, {}
    while waiting or running:
        while waiting and running < concurrency:
            engine.submit(waiting.pop(0))
            running += 1
        for output in engine.step():
            running -= 1
            done[output.key] = output
            meter.done(len(output.tokens))
    engine.reset()
    return [done[key] for key in order]
