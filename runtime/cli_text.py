"""What the commands share in talking to a terminal: progress, optional packages, options that hold options."""

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any

import typer

from lorazor.features.errors import InputError


def words(option: str, text: str) -> tuple[str, ...]:
    """The words of an option's text, as a shell has them; InputError names the option."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise InputError(f"{option} {text!r}: {error}") from None


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Turn the ImportError of a package that is not ours, inside the block, into what to install.

    That is the extra that has it; or, where another package misses a dependency of its own, that dependency.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "lorazor":
            raise
        packages = _packages(error)
        ours, asking = packages[1], packages[-1]
        if asking in (ours, "lorazor"):
            raise InputError(
                f"this needs {error.name}, which is not installed: pip install 'lorazor[{extra}]'"
            ) from None
        raise InputError(
            f"{asking} needs {error.name}, which is not installed; `pip check` says what else is missing"
        ) from None


def _packages(error: ModuleNotFoundError) -> list[str]:
    """The packages whose code was on the way to the import: `needs_extra`, the block in it, and so on."""
    names = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    return [name.partition(".")[0] for name in names if not name.startswith("importlib")]


@contextmanager
def stages() -> Iterator[Callable[[str], None]]:
    """A function to call at the start of each stage of long work: it shows the stage and, on a terminal, the time."""
    if not sys.stderr.isatty():
        yield lambda stage: typer.echo(stage, err=True)
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        running: list[Any] = []

        def show(stage: str) -> None:
            for task in running:
                progress.update(task, total=1, completed=1)
            running.append(progress.add_task(stage, total=None))

        yield show
        for task in running:
            progress.update(task, total=1, completed=1)
