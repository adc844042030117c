"""Options that several stages have, and what they may be."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from lorazor.features.errors import InputError
from lorazor.training.config import unknown
from lorazor.training.study.layout import KINDS

Out = Annotated[Path, typer.Option(metavar="DIR", help="Folder of the study; every stage reads and writes there.")]
Data = Annotated[Path, typer.Option(metavar="DIR", help="Folder of task data, with its tasks.py.")]
Base = Annotated[Path, typer.Option(metavar="DIR", help="Folder of the backbone, whose name is used in the tables.")]
Tasks = Annotated[list[str], typer.Option("--task", help="This task only; may be repeated.")]
Kinds = Annotated[list[str], typer.Option("--adapter", metavar="KIND", help=f"Of {', '.join(KINDS)}; may be repeated.")]
Drops = Annotated[list[float], typer.Option("--max-drop", help="May be repeated.")]
Confidence = Annotated[float, typer.Option(help="Of the guarantee.")]
Seed = Annotated[int, typer.Option(min=0)]
Limit = Annotated[int | None, typer.Option(min=1, help="At most so many requests of each part, for a trial.")]
MAX_DROPS = [0.01, 0.03, 0.05]


def tell(line: str) -> None:
    """Progress."""
    typer.echo(line, err=True)


def promise(max_drops: list[float], confidence: float) -> Any:
    """A `Promise`; InputError for a number out of its range."""
    from lorazor.training.study.policies import Promise

    for name, values in (("--max-drop", max_drops), ("--confidence", [confidence])):
        for value in values:
            if not 0 < value < 1:
                raise InputError(f"{name} must be above 0 and below 1, got {value:g}")
    return Promise(tuple(max_drops), confidence)


def known(names: Sequence[str], allowed: Sequence[str], kind: str) -> Sequence[str]:
    """The names; InputError for the first that is not allowed."""
    for name in names:
        if name not in allowed:
            raise InputError(unknown(kind, name, allowed))
    return names


def json_object(text: str, option: str) -> dict[str, Any]:
    """The JSON object of an option; InputError names the option."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InputError(f"{option} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InputError(f"{option} must be a JSON object, got {text}")
    return found
