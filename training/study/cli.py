"""The command line of the study: a sub-command per stage, each of which skips what is done."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from lorazor.features.command import run_command
from lorazor.training.study import cli_judge, cli_make, cli_serve

NAME = "lorazor.training.study"
app = typer.Typer(
    name=NAME,
    help="The quality study of adapters that are let go, a stage at a time, in the order below.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(cli_make.split)
app.command()(cli_make.adapters)
app.command()(cli_make.diagnose)
app.command()(cli_make.collect)
app.command()(cli_judge.policies)
app.command()(cli_judge.guarantee)
app.command()(cli_judge.ablate)
app.command()(cli_judge.texts)
app.command()(cli_serve.serve)
app.command()(cli_judge.report)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one stage; the exit code."""
    return run_command(app, sys.argv[1:] if argv is None else argv, NAME)
