"""The folder of a running collection: which shards are complete, and what the collection was started with.

A shard is complete when both of its Parquet files are in place; each is put there atomically, so a kill at any moment
leaves complete shards and at most one to be done again. `collection.json` holds everything that decides the rows; a
resume with anything else in it is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd

from lorazor.features.errors import InputError
from lorazor.training.provenance import atomic_write_text
from lorazor.training.traces import ROLLOUTS, STEPS, append

COLLECTION = "collection.json"
MAX_CHANGES = 5  # differences named in one sentence


class ShardStore:
    """The output folder; opening it checks, and with `resume` cleans, what is there.

    Args:
        folder: where the tables go; made when missing.
        snapshot: JSON-like value of everything that decides the rows.
        resume: whether a folder that is not empty is gone on with.

    Raises:
        InputError: the folder is not empty without `resume`, or was started with something else.
    """

    def __init__(self, folder: Path, snapshot: dict[str, Any], resume: bool) -> None:
        self.folder = folder
        snapshot = json.loads(json.dumps(snapshot))  # as it will be read back: tuples become lists
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder} is a file, but collect writes a folder")
        if not folder.exists() or not any(folder.iterdir()):
            folder.mkdir(parents=True, exist_ok=True)
            atomic_write_text(folder / COLLECTION, json.dumps(snapshot, indent=2, sort_keys=True) + "\n")
            return
        if not resume:
            raise InputError(f"{folder} is not empty: give another folder, or --resume to go on with this collection")
        self._check_same(snapshot)
        self._remove_leftovers()

    def complete(self, shard: str) -> bool:
        """Whether both tables of this shard are in place."""
        return all(self._path(kind, shard).exists() for kind in (STEPS, ROLLOUTS))

    def write(self, shard: str, steps: pd.DataFrame, rollouts: pd.DataFrame) -> None:
        """Put both tables of a shard in place, the rollouts last."""
        append(self.folder, STEPS, steps, shard)
        append(self.folder, ROLLOUTS, rollouts, shard)

    def _path(self, kind: str, shard: str) -> Path:
        return self.folder / kind / f"{shard}.parquet"

    def _check_same(self, snapshot: dict[str, Any]) -> None:
        path = self.folder / COLLECTION
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InputError(f"{self.folder} cannot be resumed: it has no {COLLECTION}") from None
        except (OSError, ValueError) as error:
            raise InputError(f"{path} cannot be read: {error}") from None
        changes = differences(before, snapshot)
        if changes:
            more = f" and {len(changes) - MAX_CHANGES} more" if len(changes) > MAX_CHANGES else ""
            raise InputError(f"{self.folder} was started otherwise: {'; '.join(changes[:MAX_CHANGES])}{more}")

    def _remove_leftovers(self) -> None:
        """Temporary files of a killed writer, and step files whose rollouts never came."""
        for kind in (STEPS, ROLLOUTS):
            for path in (self.folder / kind).glob(".*.tmp"):
                path.unlink()
        for kind, other in ((STEPS, ROLLOUTS), (ROLLOUTS, STEPS)):
            for path in (self.folder / kind).glob("*.parquet"):
                if not self._path(other, path.stem).exists():
                    path.unlink()


def differences(before: Any, after: Any, path: str = "") -> list[str]:
    """What differs between two JSON-like values, as `a.b was 1, is 2`, in the order of the keys."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = [*before, *(key for key in after if key not in before)]
        missing = "absent"
        return [
            line
            for key in keys
            for line in differences(before.get(key, missing), after.get(key, missing), f"{path}.{key}".lstrip("."))
        ]
    return [] if before == after else [f"{path} was {_short(before)}, is {_short(after)}"]


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
