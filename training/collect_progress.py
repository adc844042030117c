"""The progress bar of a collection: runs done of runs expected, output tokens a second, time left."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lorazor.features.grid import release_grid
from lorazor.training.collect_data import Task


class ProgressMeter:
    """A `Meter` that draws a bar on standard error; where that is no terminal it writes a line per shard.

    How many runs a request needs is known once its trace is there; until then it counts as the mean of its task so
    far, at first as what a request of max_tokens would need.
    """

    def __init__(self, tasks: dict[str, tuple[Task, int]], extra_runs: int, probe_interval: int) -> None:
        """`tasks`: each with how many of its requests are still to run; `extra_runs`: those of the noise floor."""
        self.tokens = 0
        self.runs = 0
        self._extra = extra_runs
        self._unknown = {name: left for name, (_, left) in tasks.items()}
        self._most = {
            name: 2 + len(release_grid(task.config.max_tokens, probe_interval)) for name, (task, _) in tasks.items()
        }
        self._known: dict[str, list[int]] = {name: [] for name in tasks}
        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("runs · {task.fields[rate]:,.0f} tokens/s · left"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._start, self._end = time.monotonic(), 0.0
        self._row = self._bar.add_task("starting", total=self.expected, rate=0.0)

    @property
    def expected(self) -> int:
        """The runs that this call will take, as far as can be known now."""
        total = float(self._extra)
        for name, known in self._known.items():
            mean = sum(known) / len(known) if known else self._most[name]
            total += sum(known) + self._unknown[name] * mean
        return round(total)

    @property
    def rate(self) -> float:
        """Output tokens a second since the first run."""
        return self.tokens / max(1e-9, self.seconds)

    @property
    def seconds(self) -> float:
        """Time from the first run on, until the end."""
        return (self._end or time.monotonic()) - self._start

    def __enter__(self) -> ProgressMeter:
        self._start = time.monotonic()
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end = time.monotonic()
        self._bar.stop()

    def planned(self, task: str, runs: int) -> None:
        """See `Meter`."""
        self._known[task].append(runs)
        self._unknown[task] -= 1
        self._bar.update(self._row, total=self.expected)

    def done(self, tokens: int) -> None:
        """See `Meter`."""
        self.tokens += tokens
        self.runs += 1
        self._bar.update(self._row, completed=self.runs, rate=self.rate)

    def stage(self, name: str) -> None:
        """Name what runs now."""
        self._bar.update(self._row, description=name)
        if not self._console.is_terminal:
            left = (self.expected - self.runs) * self.seconds / max(1, self.runs)
            ahead = f", about {left / 60:.0f} min left" if self.runs else ""
            self._console.print(
                f"collect: {name} · {self.runs}/{self.expected} runs · {self.rate:,.0f} tokens/s{ahead}",
                highlight=False,
                soft_wrap=True,
            )
