"""Running a command line of ours: bad input, of a user or in a file, is one sentence on stderr and exit code 2.

Anything else that goes wrong is a bug and keeps its traceback.
"""

from collections.abc import Sequence

import typer

from lorazor.features.errors import InputError

# typer brings its own copy of click in newer versions, so its base exception is found through one that typer exports.
_UsageError: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def run_command(app: typer.Typer, arguments: Sequence[str], name: str) -> int:
    """Run one command of `app`, which says `name` of itself; the exit code."""
    try:
        code = app(args=list(arguments) or ["--help"], prog_name=name, standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except Exception as error:
        sentence = _sentence(error)
        if sentence is None:
            raise
        typer.echo(f"{name}: {sentence}", err=True)
        return 2
    return code if isinstance(code, int) else 0


def _sentence(error: Exception) -> str | None:
    """What to tell the user; None for a bug."""
    if isinstance(error, InputError):
        return str(error)
    return str(error.format_message()) if isinstance(error, _UsageError) else None  # type: ignore[attr-defined]
