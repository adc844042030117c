"""For human preference: pairs of a released and a never-released text, blinded, and the key to them beside.

A coin per request, which follows from seed and request id, says which text is A. Judges get FILE, which says nothing of
who wrote what, not even by the order of the rows; FILE's name with `.key.jsonl` holds that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorazor.features.errors import InputError
from lorazor.policy.manifest import TaskPolicy
from lorazor.training.calibration import Calibration, Scored
from lorazor.training.collect_data import read_requests
from lorazor.training.output_texts import OutputTexts
from lorazor.training.provenance import atomic_path

NEVER, RELEASED = "never", "released"


@dataclass(frozen=True)
class Pairs:
    """Where pairs go. `requests`: JSONL as `collect` read it, so that what was asked is shown as well."""

    path: Path
    requests: Path | None = None
    seed: int = 0


@dataclass(frozen=True)
class PairsReport:
    """How many pairs there are, and of how many requests both texts were the same, so that nobody need judge them."""

    path: Path
    key: Path
    pairs: int
    same: int

    def render(self) -> str:
        """One line."""
        return f"{self.pairs:,} pairs in {self.path}, the key in {self.key}; {self.same:,} released texts were the same"


def key_path(path: Path) -> Path:
    """Where the key of a file of pairs lies."""
    return path.with_name(f"{path.name.removesuffix('.jsonl')}.key.jsonl")


def write_pairs(pairs: Pairs, data: Calibration) -> PairsReport:
    """Write the pairs of every released request whose text differs, and their key.

    Raises:
        InputError: a file is there already (it may hold judgements), the collection kept no texts, or a request
            is not in the file; or a file cannot be written.
    """
    path, requests, seed = pairs.path, pairs.requests, pairs.seed
    key = key_path(path)
    for file in (path, key):
        if file.exists():
            raise InputError(f"{file} is there already: give another file for the pairs")
    texts = OutputTexts(data.traces)
    found = [
        row for name, scored in data.tasks.items() for row in _released(scored, data.artifact.manifest.tasks[name])
    ]
    differing = [(i, r) for i, r in found if texts.differs(i, r)]
    asked = _asked(requests, list(data.tasks)) if requests is not None else {}
    rows = [_pair(i, texts.never(i), texts.released(i, r), seed) for i, r in differing]
    rows.sort(key=lambda row: _coin(row["request_id"], seed, "order"))
    public = [_public(number, row, asked, requests) for number, row in enumerate(rows, 1)]
    _write({key: _lines({"pair": n, **_secret(row)} for n, row in enumerate(rows, 1)), path: _lines(public)})
    return PairsReport(path, key, len(rows), len(found) - len(rows))


def _released(scored: Scored, policy: TaskPolicy) -> list[tuple[str, int]]:
    outcome = scored.table.outcome(scored.table.first_decision(scored.scores, policy.threshold))
    kept = zip(scored.table.request_id, outcome.release, outcome.released, strict=True)
    return [(str(request), int(step)) for request, step, released in kept if released]


def _asked(path: Path, tasks: Sequence[str]) -> dict[str, Any]:
    """Request -> its prompt, or its chat's messages.

    Ids are unique within a task alone, so a file would give prompts to another task's requests without a word.
    """
    if len(tasks) > 1:
        raise InputError(f"--requests is the file of one task, but these are evaluated: {', '.join(tasks)}; use --task")
    rows = [request for task in tasks for request in read_requests(path, task)]
    return {request.id: request.row.get("prompt", request.row.get("messages")) for request in rows}


def _coin(request: str, seed: int, use: str) -> bytes:
    return hashlib.sha256(f"{seed}/{use}/{request}".encode()).digest()


def _pair(request: str, never: str, released: str, seed: int) -> dict[str, Any]:
    sides = [(NEVER, never), (RELEASED, released)]
    if _coin(request, seed, "side")[0] % 2:
        sides.reverse()
    return {"request_id": request, "A": sides[0], "B": sides[1]}


def _public(number: int, row: Mapping[str, Any], asked: Mapping[str, Any], requests: Path | None) -> dict[str, Any]:
    shown: dict[str, Any] = {"pair": number}
    if requests is not None:
        if row["request_id"] not in asked:
            raise InputError(f"{requests}: request {row['request_id']} of the traces is not there")
        shown["prompt"] = asked[row["request_id"]]
    return {**shown, "A": row["A"][1], "B": row["B"][1]}


def _secret(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"request_id": row["request_id"], "A": row["A"][0], "B": row["B"][0]}


def _lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _write(files: Mapping[Path, str]) -> None:
    """All of them are complete before one is put in place: a key alone would bar the way to another try."""
    try:
        with ExitStack() as stack:
            for path, text in files.items():
                stack.enter_context(atomic_path(path)).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"--pairs {error.filename}: cannot be written ({error.strerror})") from None
