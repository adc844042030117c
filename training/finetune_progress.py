"""The progress of a fine-tuning run on standard error: a bar on a terminal, else a line for each log and validation."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback

from lorazor.features.errors import InputError


class ProgressCallback(TrainerCallback):
    """Draws nothing but on the first process; ends the run with an InputError when the loss is no number."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps · left"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._row = self._bar.add_task("training")

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """See TrainerCallback."""
        if state.is_world_process_zero:
            self._bar.update(self._row, total=state.max_steps, completed=state.global_step)
            self._bar.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """See TrainerCallback."""
        self._bar.update(self._row, completed=state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """See TrainerCallback."""
        self._bar.stop()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        """See TrainerCallback."""
        loss = logs.get("loss", logs.get("eval_loss", 0.0))
        if not math.isfinite(loss):
            raise InputError(f"the loss is {loss} at step {state.global_step}: try a lower --lr")
        text = " · ".join(f"{name} {value:.4g}" for name, value in logs.items() if "loss" in name or "exact" in name)
        if text and state.is_world_process_zero:
            self._bar.update(self._row, description=text)
            if not self._console.is_terminal:
                line = f"finetune: step {state.global_step}/{state.max_steps} · {text}"
                self._console.print(line, highlight=False, soft_wrap=True)
