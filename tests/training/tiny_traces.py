"""Three hand-made requests of one task, small enough to check every number by eye (g = 4).

| id | L | S | base | decisions c (release r): R |
|---|---|---|---|---|
| a | 8 | 1.0 | 0.0 | 0 (1): 0.0, 1 (3): 0.5, 4 (6): 1.0 |
| b | 5 | 0.5 | 0.5 | 0 (1): 0.5, 1 (3): 0.75 |
| c | 4 | 0.0 | 0.0 | 0 (1): 0.5 other text, 1 (3): 0.0 same text |
"""

from typing import Any

import numpy as np
import pandas as pd

from lorazor.training.trace_checks import checked
from lorazor.training.traces import AdapterInfo, Meta, ModelInfo, TaskInfo, TraceSet

G = 4
LENGTHS = {"a": 8, "b": 5, "c": 4}
ADAPTER = {"a": 1.0, "b": 0.5, "c": 0.0}
BASE = {"a": 0.0, "b": 0.5, "c": 0.0}
RELEASED = [
    ("a", 1, 0.0, 4, False),
    ("a", 3, 0.5, 10, False),
    ("a", 6, 1.0, 8, True),
    ("b", 1, 0.5, 5, False),
    ("b", 3, 0.75, 5, False),
    ("c", 1, 0.5, 6, False),
    ("c", 3, 0.0, 4, True),
]


def tiny_meta() -> Meta:
    """The meta.json of the tiny traces."""
    return Meta(
        base=ModelInfo(name="base", fingerprint="0" * 64),
        adapters=[AdapterInfo(name="sql-lora", fingerprint="1" * 64, task="sql")],
        probe_interval=G,
        tasks={"sql": TaskInfo(max_tokens=16, scorer="exact")},
    )


def tiny_steps() -> pd.DataFrame:
    """The step rows, signals included."""
    rows: list[dict[str, Any]] = []
    for request, length in LENGTHS.items():
        for step in range(length):
            probed = step == 1 or (step > 0 and step % G == 0)
            rows.append(
                {"request_id": request, "task": "sql", "adapter": "sql-lora", "step": step, "token_id": 10 + step}
                | {"prompt_tokens": 7, "max_tokens": 16, "entropy": 0.1 * step, "top1_prob": 0.9, "margin": 0.8}
                | {"token_logprob": -0.1, "probed": probed, "kl": 0.5 if probed else np.nan}
                | {"js": 0.1 if probed else np.nan, "base_top1_agrees": float(step > 1) if probed else np.nan}
                | {"base_token_logprob": -0.2 if probed else np.nan, "base_entropy": 0.3 if probed else np.nan}
            )
    ints = dict.fromkeys(("step", "token_id", "prompt_tokens", "max_tokens"), np.int32)
    floats = {name: np.float32 for name, value in rows[0].items() if isinstance(value, float)}
    return pd.DataFrame(rows).astype({**ints, **floats})


def tiny_rollouts() -> pd.DataFrame:
    """The rollout rows."""
    never = [(i, "adapter", None, ADAPTER[i], LENGTHS[i], True) for i in LENGTHS]
    base = [(i, "base", None, BASE[i], 3, False) for i in LENGTHS]
    released = [(i, "released", r, score, tokens, same) for i, r, score, tokens, same in RELEASED]
    columns = ["request_id", "mode", "release_step", "score", "output_tokens", "same_text"]
    frame = pd.DataFrame([*never, *base, *released], columns=columns)
    frame = frame.assign(task="sql", adapter="sql-lora", finish_reason="stop", differs=False)
    return frame.astype({"release_step": "Int32", "score": np.float32, "output_tokens": np.int32})


def tiny_traces() -> TraceSet:
    """The tables as a checked `TraceSet`."""
    return checked(tiny_steps(), tiny_rollouts(), tiny_meta())
