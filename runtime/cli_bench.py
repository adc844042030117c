"""`lorazor bench`: its command line; cli_bench_run.py does the work."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from lorazor.runtime.cli_text import needs_extra, stages, words
from lorazor.runtime.processes import terminated_as_interrupted


class WorkloadName(StrEnum):
    """See `lorazor.training.bench_workload.WORKLOADS`."""

    SHORT = "short"
    LONG = "long"
    MIXED = "mixed"
    BURST = "burst"


class ArrivalName(StrEnum):
    """How requests come."""

    CLOSED = "closed"
    STAGGERED = "staggered"
    POISSON = "poisson"
    BURST = "burst"


class ChoiceName(StrEnum):
    """How requests choose their adapters."""

    UNIFORM = "uniform"
    ZIPF = "zipf"


def bench(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder of the base model, or its name on the hub.")],
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- VLLM OPTIONS", help="Options of vllm serve, for both servers."),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PATH", help="An adapter; repeat it. A folder alone: every adapter inside it."),
    ] = None,
    policy: Annotated[str | None, typer.Option(help="Policy artifact that decides where LoRazor releases.")] = None,
    release_steps: Annotated[
        str | None,
        typer.Option(metavar="FORM", help="Without a policy: uniform:LOW:SHARE (the default is uniform:1:0.35)."),
    ] = None,
    never: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Without a policy: this share never releases (0.15).")
    ] = None,
    workload: Annotated[WorkloadName, typer.Option(help="Lengths, adapter choice and arrivals to begin from.")] = (
        WorkloadName.MIXED
    ),
    arrivals: Annotated[
        ArrivalName | None, typer.Option(help="closed: in step; staggered: closed, requests ending one by one.")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Requests per second of poisson and burst arrivals.")] = None,
    burstiness: Annotated[float | None, typer.Option(help="Of burst arrivals: 1 is Poisson, less is rougher.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Requests under way in a closed loop (128).")] = None,
    requests: Annotated[int | None, typer.Option(help="Requests of each arm in each round (256).")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(help="Length of the random prompts.")] = None,
    output_tokens: Annotated[int | None, typer.Option(help="Length of the answers; the most, if natural.")] = None,
    natural_length: Annotated[
        bool, typer.Option("--natural-length", help="Measure also with answers that end where the model ends them.")
    ] = False,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help='JSONL instead of random prompts: {"prompt": …, "adapter": NAME or none}.'),
    ] = None,
    adapter_choice: Annotated[ChoiceName | None, typer.Option(help="How often each adapter is asked for.")] = None,
    zipf_exponent: Annotated[float | None, typer.Option(help="Of the Zipf choice (1).")] = None,
    rounds: Annotated[int, typer.Option(help="Rounds; in each, every arm has its turn.")] = 3,
    seed: Annotated[int, typer.Option(help="Of prompts, adapters, release steps and arrivals.")] = 0,
    one_at_a_time: Annotated[
        bool, typer.Option("--one-at-a-time", help="Stop one server before the other starts: slower, less memory.")
    ] = False,
    stock_options: Annotated[
        str, typer.Option(metavar="TEXT", help="More options of vllm serve for stock alone: --max-loras 64.")
    ] = "",
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="For results.json, report.html and logs/.")] = Path(
        "bench"
    ),
) -> None:
    """Compare stock vLLM with LoRazor on the same requests, taking turns, on vLLM's own load generator.

    Three arms: stock; LoRazor with releases, by a policy or replayed from a distribution; LoRazor never releasing.

    \b
    Example:
      lorazor bench models/base --adapter sql=adapters/sql --adapter chat=adapters/chat --policy policy/ \\
          --workload mixed --arrivals poisson --rate 20 --natural-length --out bench/ -- --max-num-seqs 128
    """
    changes = {
        **{"arrivals": arrivals, "rate": rate, "burstiness": burstiness, "concurrency": concurrency},
        **{"requests": requests, "prompt_tokens": prompt_tokens, "output_tokens": output_tokens},
        **{"choice": adapter_choice, "zipf_exponent": zipf_exponent},
    }
    with needs_extra("bench"), terminated_as_interrupted(), stages() as say:
        from lorazor.runtime.cli_bench_run import Asked, run

        asked = Asked(
            model=model,
            adapters=tuple(adapter or ()),
            options=tuple(options or ()),
            stock_options=words("--stock-options", stock_options),
            policy=policy,
            release_steps=release_steps,
            never=never,
            workload=workload.value,
            changes=changes,
            prompts=prompts,
            natural=natural_length,
            rounds=rounds,
            seed=seed,
            one_at_a_time=one_at_a_time,
            out=out,
        )
        lines = run(asked, say)
    typer.echo("\n".join(lines))
