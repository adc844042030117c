"""`lorazor train`, `tune`, `evaluate` and `inspect`: the life of a policy between the traces and the server."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from lorazor.features.errors import InputError
from lorazor.runtime.cli_text import needs_extra, stages

Policy = Annotated[str, typer.Argument(metavar="POLICY", help="Policy artifact: a folder, or models:/name@alias.")]
Traces = Annotated[
    Path, typer.Argument(metavar="TRACES", help="Folder of traces, as collect or import-traces writes it.")
]
OneTask = Annotated[str | None, typer.Option(help="This task only.")]
Unseen = Annotated[bool, typer.Option("--unseen-only", help="Leave out the requests that training saw.")]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the numbers to this file.")]


class Loss(StrEnum):
    """What `--max-drop` limits; see `lorazor.training.losses`."""

    RELATIVE = "relative"
    NET = "net"
    ABSOLUTE = "absolute"
    SIGNED = "signed"


def train(
    traces: Traces,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder for the policy artifact.")],
    without_probes: Annotated[
        bool, typer.Option("--without-probes", help="Save the policy `without probes`: a server of it never probes.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the split, of LightGBM and of the random baseline.")] = 0,
    leave_out: Annotated[
        float, typer.Option(metavar="SHARE", help="Requests not to look at, for tune and evaluate --unseen-only.")
    ] = 0.0,
    threads: Annotated[int, typer.Option(help="Threads of LightGBM.")] = 1,
    drop_limit: Annotated[
        list[float] | None,
        typer.Option(metavar="DROP", help="Compare the policies at this drop; may be repeated (0.01 and 0.03)."),
    ] = None,
    mlflow: Annotated[str, typer.Option(metavar="URI", help="MLflow store; auto: a local sqlite file.")] = "auto",
    no_mlflow: Annotated[bool, typer.Option("--no-mlflow", help="Do not track the run.")] = False,
    register: Annotated[str | None, typer.Option(metavar="NAME", help="Register the policy, as NAME[@ALIAS].")] = None,
    figures: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for the figures.")] = None,
    json: Json = None,
) -> None:
    """Train a release policy on traces, compare it with every baseline, save it; `tune` then sets its thresholds.

    Policies that learnt from 60 % of the requests are compared on 20 % that they never saw; the one saved has then
    learnt from all but those that --leave-out leaves, so `tune` and `evaluate` need these or others.

    \b
    Examples:
      lorazor train traces/ policy/ --figures figures/ --register sql-release@staging
      lorazor train traces/ policy/ --without-probes
    """
    with needs_extra("training"), stages() as progress:
        from lorazor.training import train as training
        from lorazor.training.traces import read_traces
        from lorazor.training.tune_report import write_json

        report = training.train(
            read_traces(traces),
            out,
            probes=not without_probes,
            seed=seed,
            leave_out=leave_out,
            threads=threads,
            drop_limits=tuple(drop_limit or training.DROP_LIMITS),
            mlflow_uri=None if no_mlflow else mlflow,
            register_as=register,
            figures=figures,
            progress=progress,
        )
        if json is not None:
            write_json(json, report.to_dict())
    typer.echo(report.render())


def tune(
    policy: Policy,
    traces: Traces,
    max_drop: Annotated[float | None, typer.Option(help="Allowed loss, in (0, 1): 0.05 is 5 %.")] = None,
    confidence: Annotated[float, typer.Option(help="Of the guarantee, in (0, 1).")] = 0.9,
    loss: Annotated[
        Loss | None,
        typer.Option(
            help="What --max-drop limits: what answers that got worse lost (relative), less what others gained (net), "
            "or either in points of the score (absolute, signed). Relative, or signed if sampled."
        ),
    ] = None,
    task: OneTask = None,
    threshold: Annotated[float | None, typer.Option(help="Set by hand, in [0, 1]; no guarantee; needs --task.")] = None,
    target_share: Annotated[
        float | None, typer.Option(help="Set by outcome: the active-row share wanted; no guarantee; needs --task.")
    ] = None,
    unseen_only: Unseen = False,
    json: Json = None,
) -> None:
    """Set the threshold of each task with a guarantee, on requests that training never saw.

    \b
    Examples:
      lorazor tune policy/ calibration/ --max-drop 0.05 --confidence 0.9
      lorazor tune policy/ calibration/ --task sql --threshold 0.93
      lorazor tune policy/ calibration/ --task sql --target-share 0.3
    """
    with needs_extra("training"), stages() as progress:
        from lorazor.training.tune import tune as run

        report = run(
            policy,
            traces,
            max_drop=max_drop,
            confidence=confidence,
            kind=None if loss is None else loss.value,
            task=task,
            threshold=threshold,
            target_share=target_share,
            unseen_only=unseen_only,
            json_path=json,
            progress=progress,
        )
    typer.echo(report.render())


def evaluate(
    policy: Policy,
    traces: Traces,
    task: OneTask = None,
    unseen_only: Unseen = False,
    json: Json = None,
    pairs: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write released and never-released texts for blind judges.")
    ] = None,
    requests: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The collection's JSONL, to show what was asked in each pair.")
    ] = None,
    pairs_seed: Annotated[int, typer.Option(min=0, help="Of the order in pairs.")] = 0,
) -> None:
    """Replay a policy, as it stands, exactly over traces and rollouts.

    \b
    Examples:
      lorazor evaluate policy/ test-traces/ --json evaluation.json
      lorazor evaluate policy/ test-traces/ --pairs judge.jsonl --requests test.jsonl
    """
    with needs_extra("training"), stages() as progress:
        from lorazor.training.evaluate import evaluate as run
        from lorazor.training.pairs import Pairs

        if requests is not None and pairs is None:
            raise InputError(f"--requests {requests} shows what was asked in --pairs, which is not given")
        for_judges = Pairs(pairs, requests, pairs_seed) if pairs is not None else None
        report = run(
            policy, traces, task=task, unseen_only=unseen_only, json_path=json, pairs=for_judges, progress=progress
        )
    typer.echo(report.render())


def inspect(
    policy: Policy,
    top: Annotated[int, typer.Option(min=1, help="How many of the most important features to show.")] = 10,
    traces: Annotated[Path | None, typer.Option(help="Draw the score over a request of these traces.")] = None,
    request: Annotated[
        str | None, typer.Option(metavar="ID", help="Which request; the first one of each task.")
    ] = None,
) -> None:
    """Say what a policy is, what it promises and what it looks at; with traces, draw its score over a request.

    \b
    Examples:
      lorazor inspect policy/
      lorazor inspect policy/ --traces traces/ --request sql-17
    """
    from lorazor.policy.artifact import load_artifact
    from lorazor.policy.inspect import describe

    typer.echo(describe(load_artifact(policy), top))
    if traces is not None:
        with needs_extra("training"):
            from lorazor.runtime.cli_drawing import drawings

            for drawing in drawings(policy, traces, request):
                typer.echo(f"\n{drawing}")
