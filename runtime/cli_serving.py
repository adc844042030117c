"""`lorazor serve`, `doctor` and `demo`: the commands around a running server."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from lorazor.features.errors import InputError


class PassThrough(TyperCommand):
    """A command whose arguments are not read here: `serve` leaves most of them to vLLM's own parser."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep every argument, in order, `--help` included."""
        ctx.args = list(args)
        return []


def serve(context: typer.Context) -> None:
    """Serve a base model and its adapters with a policy: `vllm serve` and every flag of it.

    \b
    Example:
      lorazor serve models/base --policy policy/ --release-fraction 0.05 --lora-modules sql=adapters/sql
    """
    from lorazor.runtime import serve as serving

    if not context.args or {"-h", "--help"} & set(context.args):
        typer.echo(serving.HELP)
        return
    raise typer.Exit(serving.run(context.args, lambda line: typer.echo(f"lorazor: {line}", err=True)))


def doctor() -> None:
    """Say what is installed, what fits together, what is missing and how to mend it.

    The exit code is 1 if something stops LoRazor from serving here.

    \b
    Example:
      lorazor doctor
    """
    from lorazor.runtime.doctor import examine, exit_code, render

    findings = examine()
    typer.echo(render(findings))
    raise typer.Exit(exit_code(findings))


def demo() -> None:
    """Run the demonstration in a checkout: a real model on two cores, from committed traces to released requests.

    \b
    Example:
      lorazor demo
    """
    script = Path("examples", "demo.py")
    if not script.is_file():
        raise InputError(
            "the demo needs a checkout of LoRazor, whose adapters and traces are not in the package: cd to it"
        )
    raise typer.Exit(subprocess.run([sys.executable, str(script)], check=False).returncode)
