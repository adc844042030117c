"""The stage that runs whole servers."""

from typing import Annotated, Any

import typer

from lorazor.features.errors import InputError
from lorazor.training.study.layout import Layout
from lorazor.training.study.options import Base, Confidence, Data, Kinds, Limit, Out, Seed, known, promise, tell


def serve(
    data: Data,
    base: Base,
    out: Out,
    adapter: Kinds = [],  # noqa: B006
    concurrency: Annotated[int, typer.Option(min=1, help="Requests under way at a time.")] = 64,
    serve_args: Annotated[str, typer.Option(metavar="TEXT", help="Of vllm serve, for all servers.")] = "",
    loss: Annotated[str, typer.Option(metavar="[relative|net]", help="What --max-drop limits.")] = "relative",
    max_drop: Annotated[float, typer.Option(help="What the policy is tuned to.")] = 0.03,
    confidence: Confidence = 0.9,
    limit: Limit = None,
    seed: Seed = 0,
) -> None:
    """Serve every adapter of a kind at once: under the tuned policy, never released, and with stock vLLM.

    \b
    Example:
      python -P -m lorazor.training.study serve --data data/ --base models/base --out study/ \\
          --serve-args "--dtype bfloat16 --max-num-seqs 128"
    """
    from lorazor.training.study.asking import Serving
    from lorazor.training.study.policies import Promise
    from lorazor.training.study.serve import serve as run
    from lorazor.training.study.servers import servers_of

    promise([max_drop], confidence)
    layout, backbone = Layout(out), base.resolve().name
    cells = [cell for cell in layout.collected((), adapter) if cell.backbone == backbone]
    if not cells:
        raise InputError(f"{out} holds no traces of the backbone {backbone!r}: run the stage collect first")
    kind: Any = known([loss], Promise.kinds, "loss")[0]
    how = Serving(max_drop, confidence, concurrency, serve_args, kind, limit, seed)
    run(data, layout, base, cells, how, tell, servers_of)
