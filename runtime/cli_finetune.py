"""`lorazor finetune`: an adapter that can be let go."""

from pathlib import Path
from typing import Annotated

import typer

from lorazor.runtime.cli_text import needs_extra
from lorazor.training.finetune_cuts import Cut


def finetune(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder of the base model.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New folder for the adapter.")],
    data: Annotated[
        list[Path],
        typer.Option(metavar="FILE", help="JSONL: prompt or messages, and target or reference; may be repeated."),
    ],
    init: Annotated[
        Path | None,
        typer.Option(metavar="ADAPTER", help="Go on from this LoRA adapter, with its rank, alpha and targets."),
    ] = None,
    validation: Annotated[Path | None, typer.Option(metavar="FILE", help="The same, for validation.")] = None,
    validation_share: Annotated[float, typer.Option(help="Of the prompts, held out where no file is given.")] = 0.05,
    cut: Annotated[Cut, typer.Option(help="Where training lets the adapter go.")] = Cut.RELEASE_AWARE,
    prompt_share: Annotated[float, typer.Option(help="release-aware: examples let go after the prompt.")] = 0.5,
    uniform_share: Annotated[
        float, typer.Option(help="release-aware: examples let go at a log-uniform step of the target; the rest never.")
    ] = 0.3,
    distill: Annotated[
        float, typer.Option(metavar="WEIGHT", help="Of the divergence of two released paths from the full one; 0: off.")
    ] = 0.0,
    own_outputs: Annotated[
        float, typer.Option(metavar="SHARE", help="Of the steps, on the adapter's own greedy outputs.")
    ] = 0.0,
    refresh: Annotated[int, typer.Option(metavar="STEPS", help="How long an own output is kept.")] = 200,
    rank: Annotated[int | None, typer.Option(help="Of the adapter; 16.")] = None,
    alpha: Annotated[float | None, typer.Option(help="Scale times rank; twice the rank.")] = None,
    targets: Annotated[str | None, typer.Option(help="Names of linear layers, with commas; all-linear.")] = None,
    lr: Annotated[float, typer.Option(help="Learning rate: 5 % warm-up, then a cosine.")] = 5e-4,
    epochs: Annotated[float, typer.Option(help="Passes over the data, at most.")] = 3.0,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps, in place of epochs.")] = None,
    batch: Annotated[int, typer.Option(help="Examples at once on each device.")] = 16,
    accumulate: Annotated[int, typer.Option(help="Batches to an optimizer step.")] = 1,
    max_length: Annotated[int, typer.Option(help="The most tokens of prompt and target.")] = 1024,
    group_by_length: Annotated[
        bool, typer.Option("--group-by-length", help="Examples alike in length together: less padding, less chance.")
    ] = False,
    bf16: Annotated[bool, typer.Option("--bf16", help="Base and computation in bfloat16.")] = False,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Less memory, a third more time.")
    ] = False,
    compile: Annotated[
        bool, typer.Option("--compile", help="Fuse the layers with torch.compile: faster after half a minute.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of weights, order and cuts.")] = 0,
    eval_every: Annotated[int, typer.Option(metavar="STEPS", help="Between validations, and checkpoints.")] = 100,
    patience: Annotated[int, typer.Option(help="Stop after so many validations without gain; 0: never.")] = 5,
    select_on: Annotated[str, typer.Option(metavar="[loss|exact]", help="What the best checkpoint is by.")] = "loss",
    base_name: Annotated[str | None, typer.Option(help="Of the base in the adapter's files; the folder.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint.")] = False,
    mlflow: Annotated[str, typer.Option(metavar="URI", help="MLflow store; auto: a local sqlite file.")] = "auto",
    no_mlflow: Annotated[bool, typer.Option("--no-mlflow", help="Do not track the run.")] = False,
) -> None:
    """Train a LoRA adapter that still serves when it is released early: in training it is let go at random steps.

    The result is a PEFT folder for any server. --cut never is ordinary LoRA training, prompt is prompt-only training.
    On several GPUs: torchrun --no-python --nproc-per-node 4 lorazor finetune ...

    \b
    Example:
      lorazor finetune models/base adapters/sql --data sql.jsonl --rank 16 --lr 5e-4 --epochs 3 --bf16
      lorazor finetune models/base adapters/sql-lets-go --init adapters/sql --data sql.jsonl --bf16
    """
    options = {key: value for key, value in locals().items() if key not in ("out", "resume", "mlflow", "no_mlflow")}
    with needs_extra("training"):
        from lorazor.training.finetune import finetune as run
        from lorazor.training.finetune_config import finetune_config

        options["targets"] = targets and tuple(name.strip() for name in targets.split(","))
        config = finetune_config(**options)
        report = run(config, out, resume=resume, mlflow_uri=None if no_mlflow else mlflow, progress=_stage)
    if report is not None:
        typer.echo(report.render())


def _stage(name: str) -> None:
    """A plain line: the training draws a bar of its own."""
    typer.echo(name, err=True)
