"""The `lorazor` command: one place that knows all commands; each imports what it needs only when it runs."""

import sys
from collections.abc import Sequence

import typer

from lorazor.features.command import run_command
from lorazor.runtime import cli_bench, cli_data, cli_finetune, cli_policy, cli_serving

# Plain help: it appears at once, and example lines stay as they are written.
app = typer.Typer(
    name="lorazor",
    help="Serve LoRA adapters that let go: learn when the base model can finish a request, and release it there.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(short_help="Record decode traces and rollouts with vLLM.")(cli_data.collect)
app.command(short_help="Check tables that somebody else recorded.")(cli_data.import_traces)
app.command(short_help="Train an adapter that can be let go.")(cli_finetune.finetune)
app.command(short_help="Train a release policy on traces.")(cli_policy.train)
app.command(short_help="Set thresholds, with a guarantee.")(cli_policy.tune)
app.command(short_help="Replay a policy over traces, exactly.")(cli_policy.evaluate)
app.command(short_help="Say what a policy is and what it promises.")(cli_policy.inspect)
app.command(short_help="vllm serve, with a policy.", cls=cli_serving.PassThrough)(cli_serving.serve)
app.command(short_help="Stock vLLM against LoRazor, measured.")(cli_bench.bench)
app.command(short_help="Say what is installed, fits and is missing.")(cli_serving.doctor)
app.command(short_help="Run the demonstration, in a checkout.")(cli_serving.demo)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code.

    Args:
        argv: the arguments after the program's name; None: those of this process.
    """
    return run_command(app, sys.argv[1:] if argv is None else argv, "lorazor")
