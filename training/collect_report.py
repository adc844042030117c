"""What a collection says of itself when it ends."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from lorazor.training.traces import Noise, TraceSet


@dataclass(frozen=True)
class TaskSummary:
    """What was collected of one task; the scores are means over its requests."""

    requests: int
    released_runs: int
    left_out: int
    q_adapter: float
    q_base: float
    mean_output_tokens: float
    noise: Noise | None


@dataclass(frozen=True)
class CollectReport:
    """The result of a collection; `tokens` and `seconds` are those of this call's runs, without the engine's start."""

    folder: Path
    tasks: dict[str, TaskSummary]
    shards: int
    resumed_shards: int
    tokens: int
    seconds: float

    def render(self) -> str:
        """A table for the terminal."""
        lines = [
            f"{'task':<16}{'requests':>9}{'runs':>8}{'left out':>9}{'Q_base':>8}{'Q_adapter':>10}{'tokens':>8}  noise"
        ]
        for name, task in self.tasks.items():
            noise = (
                f"{task.noise.differing}/{task.noise.n} differ, |dS| {task.noise.mean_abs_diff:.4f}"
                if task.noise
                else "-"
            )
            lines.append(
                f"{name:<16}{task.requests:>9}{task.released_runs:>8}{task.left_out:>9}{task.q_base:>8.3f}"
                f"{task.q_adapter:>10.3f}{task.mean_output_tokens:>8.1f}  {noise}"
            )
        again = f" ({self.resumed_shards} were there already)" if self.resumed_shards else ""
        rate = self.tokens / self.seconds if self.seconds else 0.0
        speed = f"{self.tokens:,} tokens in {self.seconds:.0f} s ({rate:,.0f}/s)"
        lines.append(f"{self.shards} shards{again}, {speed}: {self.folder}")
        return "\n".join(lines)


def summarize(traces: TraceSet, task: str) -> TaskSummary:
    """The summary of one task's rows."""
    rows: pd.DataFrame = traces.select(task).rollouts
    by_mode = dict(iter(rows.groupby("mode")))
    released = by_mode.get("released", rows.iloc[:0])
    return TaskSummary(
        requests=len(by_mode["adapter"]),
        released_runs=len(released),
        left_out=int(released["differs"].sum()),
        q_adapter=float(by_mode["adapter"]["score"].mean()),
        q_base=float(by_mode["base"]["score"].mean()),
        mean_output_tokens=float(by_mode["adapter"]["output_tokens"].mean()),
        noise=traces.meta.noise.get(task),
    )
