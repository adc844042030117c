"""The places of a fine-tuning run: the output folder, which appears whole at the end, and the checkpoints beside it.

`settings.json` among the checkpoints holds everything that decides the weights; a resume with anything else is refused.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from lorazor.features.errors import InputError
from lorazor.training.collect_store import differences
from lorazor.training.provenance import atomic_write_text

SETTINGS = "settings.json"
COMPLETE = "trainer_state.json"  # what transformers writes last into a checkpoint


class Checkpoints:
    """The folder OUT.checkpoints."""

    def __init__(self, out: Path) -> None:
        self.out, self.folder = out, out.with_name(f"{out.name}.checkpoints")

    def check(self, resume: bool) -> None:
        """InputError when the output exists, or checkpoints do that nobody asked to go on with."""
        if self.out.exists():
            raise InputError(f"{self.out} exists already; give another place for the adapter")
        if self.folder.exists() and not resume:
            raise InputError(
                f"{self.folder} holds a run that did not end: give --resume to go on with it, or remove it"
            )

    def open(self, settings: dict[str, Any]) -> None:
        """Start the folder, or check that it was started with the same settings."""
        path = self.folder / SETTINGS
        settings = json.loads(json.dumps(settings))  # as it will be read back
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            atomic_write_text(path, json.dumps(settings, indent=1) + "\n")
            return
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"{path} cannot be read: {error}") from None
        if changes := differences(before, settings):
            raise InputError(f"{self.folder} was started otherwise: {'; '.join(changes[:5])}")

    def last(self) -> str | None:
        """The newest checkpoint that was written to its end."""
        done = [path.parent for path in self.folder.glob(f"checkpoint-*/{COMPLETE}")]
        newest = max(done, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
        return None if newest is None else str(newest)

    def remove(self) -> None:
        """The run has ended and its output is in place."""
        shutil.rmtree(self.folder, ignore_errors=True)
