"""Where everything of a study lies in its output folder, and which cells it has.

split/TASK/PART.jsonl, split.csv                         what each part holds
adapters/BACKBONE/TASK/KIND/                             a PEFT folder
traces/BACKBONE/TASK/KIND/{requests.jsonl, rows/}        one collection, all policy parts
policies/BACKBONE/TASK/KIND/                             a policy artifact that is not tuned yet
served/BACKBONE/KIND/{policy/, NAME.log}                 the tuned artifact that was served, and what the servers said
NAME.csv                                                 results, a row per measured thing
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

from lorazor.features.errors import InputError
from lorazor.training.config import unknown

ADAPTER_TRAIN, ADAPTER_VALIDATION = "adapter-train", "adapter-validation"
POLICY_TRAIN, CALIBRATE, TEST = "policy-train", "calibrate", "test"
ADAPTER_PARTS = (ADAPTER_TRAIN, ADAPTER_VALIDATION)
POLICY_PARTS = (POLICY_TRAIN, CALIBRATE, TEST)
KINDS = ("ordinary", "prompt-only", "release-aware")


@dataclass(frozen=True)
class Cell:
    """One adapter of the study: its backbone, its task, and how it was trained (`adapter`, one of KINDS)."""

    backbone: str
    task: str
    adapter: str

    def row(self) -> dict[str, str]:
        """The columns by which its rows are known."""
        return asdict(self)

    @property
    def served_name(self) -> str:
        """The name under which its adapter is collected and served."""
        return f"{self.task}-{self.adapter}"

    def __str__(self) -> str:
        return f"{self.backbone} · {self.task} · {self.adapter}"


@dataclass(frozen=True)
class Layout:
    """The output folder."""

    out: Path

    def part(self, task: str, part: str) -> Path:
        """The rows of one part of a task."""
        return self.out / "split" / task / f"{part}.jsonl"

    def adapter(self, cell: Cell) -> Path:
        """The adapter's PEFT folder."""
        return self._of("adapters", cell)

    def collection(self, cell: Cell) -> Path:
        """The folder of its collection: the requests that were asked, and in `rows/` the traces."""
        return self._of("traces", cell)

    def artifact(self, cell: Cell) -> Path:
        """The policy that was trained on its traces."""
        return self._of("policies", cell)

    def served(self, cell: Cell) -> Path:
        """The folder of its backbone's and kind's servers, which hold the adapters of all tasks."""
        return self.out / "served" / cell.backbone / cell.adapter

    def csv(self, name: str) -> Path:
        """A table of results."""
        return self.out / f"{name}.csv"

    def split_tasks(self, wanted: Collection[str] = ()) -> list[str]:
        """The tasks that were split, or those of them that are wanted.

        Raises:
            InputError: nothing was split, or a wanted task was not.
        """
        found = sorted(path.parent.name for path in self.out.glob(f"split/*/{TEST}.jsonl"))
        if not found:
            raise InputError(f"{self.out} holds no split tasks: run the stage split first")
        return _those(found, wanted, "task")

    def collected(self, tasks: Collection[str] = (), adapters: Collection[str] = ()) -> list[Cell]:
        """The cells that have traces, of these tasks and adapter kinds (all where none is named).

        Raises:
            InputError: there are none.
        """
        paths = sorted(self.out.glob("traces/*/*/*/rows/meta.json"))
        cells = [Cell(*path.parts[-5:-2]) for path in paths]
        if not cells:
            raise InputError(f"{self.out} holds no traces: run the stage collect first")
        named = _those(sorted({c.task for c in cells}), tasks, "task")
        kinds = _those(sorted({c.adapter for c in cells}), adapters, "adapter")
        return [c for c in cells if c.task in named and c.adapter in kinds]

    def _of(self, what: str, cell: Cell) -> Path:
        return self.out / what / cell.backbone / cell.task / cell.adapter


def _those(found: list[str], wanted: Collection[str], kind: str) -> list[str]:
    for name in wanted:
        if name not in found:
            raise InputError(unknown(kind, name, found))
    return [name for name in found if name in wanted or not wanted]
