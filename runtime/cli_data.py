"""`lorazor collect` and `lorazor import-traces`: where the data of a policy come from."""

from pathlib import Path
from typing import Annotated

import typer

from lorazor.features.errors import InputError
from lorazor.runtime.cli_text import needs_extra


def collect(
    config: Annotated[
        Path,
        typer.Argument(metavar="CONFIG", help="YAML: base, adapters, tasks (data, scorer, max_tokens), g."),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder for steps/, rollouts/ and meta.json.")],
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a collection that was stopped.")] = False,
    limit: Annotated[int | None, typer.Option(help="At most so many requests of each task.")] = None,
) -> None:
    """Record decode traces and rollouts with vLLM: the data that a policy is trained and tuned on.

    \b
    Example:
      lorazor collect collect.yaml traces/ --resume
    """
    with needs_extra("training"):
        from lorazor.training.collect import collect as run

        typer.echo(run(config, out, resume=resume, limit=limit).render())


def import_traces(
    source: Annotated[
        Path,
        typer.Argument(metavar="SOURCE", help="Folder with tables steps* and rollouts* (Parquet, CSV, JSONL)."),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New folder for the checked traces.")],
    base: Annotated[Path | None, typer.Option(help="Folder of the base model, for its fingerprint.")] = None,
    adapter: Annotated[
        list[str] | None, typer.Option(metavar="NAME=FOLDER", help="An adapter of the tables; once for each of them.")
    ] = None,
    probe_interval: Annotated[int | None, typer.Option(help="g: every so many tokens a step was probed.")] = None,
    sampled: Annotated[bool, typer.Option("--sampled", help="The texts were drawn with a temperature.")] = False,
) -> None:
    """Check tables that somebody else recorded, say what is wrong by column and row, and write them as traces.

    \b
    Example:
      lorazor import-traces tables/ traces/ --base models/base --adapter sql=adapters/sql --probe-interval 8
    """
    folders = dict(_named_folder(text) for text in adapter or ())
    with needs_extra("training"):
        from lorazor.training.import_traces import import_traces as run

        report = run(source, out, base=base, adapters=folders, probe_interval=probe_interval, sampled=sampled)
        typer.echo(report.render())


def _named_folder(text: str) -> tuple[str, str]:
    name, equals, folder = text.partition("=")
    if not name or not equals or not folder:
        raise InputError(f"--adapter must be NAME=FOLDER, got {text!r}")
    return name, folder
