"""The stages that need no GPU: policies, guarantee, ablate, texts and report."""

from typing import Annotated

import typer

from lorazor.training.study.layout import Layout
from lorazor.training.study.options import MAX_DROPS, Confidence, Drops, Kinds, Out, Seed, Tasks, promise, tell


def policies(
    out: Out,
    task: Tasks = [],  # noqa: B006
    adapter: Kinds = [],  # noqa: B006
    max_drop: Drops = MAX_DROPS,
    confidence: Confidence = 0.9,
    seed: Seed = 0,
) -> None:
    """Train, tune and test the learnt policy and every baseline, by look-up.

    \b
    Example:
      python -P -m lorazor.training.study policies --out study/
    """
    from lorazor.training.study.policies import policies as run

    layout = Layout(out)
    run(layout, layout.collected(task, adapter), promise(max_drop, confidence), seed=seed, progress=tell)


def guarantee(
    out: Out,
    task: Tasks = [],  # noqa: B006
    adapter: Kinds = [],  # noqa: B006
    max_drop: Drops = MAX_DROPS,
    confidence: Confidence = 0.9,
    draws: Annotated[int, typer.Option(min=1, help="Calibration sets of each cell.")] = 200,
    seed: Seed = 0,
) -> None:
    """Hold the promise of tune against the truth of a pool of requests, and against drift.

    \b
    Example:
      python -P -m lorazor.training.study guarantee --out study/
    """
    from lorazor.training.study.guarantee import guarantee as run

    layout, asked = Layout(out), promise(max_drop, confidence)
    run(layout, layout.collected(task, adapter), asked, draws=draws, seed=seed, progress=tell)


def ablate(
    out: Out,
    task: Tasks = [],  # noqa: B006
    adapter: Kinds = [],  # noqa: B006
    max_drop: Drops = MAX_DROPS,
    confidence: Confidence = 0.9,
    seed: Seed = 0,
) -> None:
    """What the policy loses without probes, with fewer of them, and when it comes from elsewhere.

    \b
    Example:
      python -P -m lorazor.training.study ablate --out study/
    """
    from lorazor.training.study.ablate import ablate as run

    layout = Layout(out)
    run(layout, layout.collected(task, adapter), promise(max_drop, confidence), seed=seed, progress=tell)


def texts(
    out: Out,
    task: Tasks = [],  # noqa: B006
    adapter: Kinds = [],  # noqa: B006
    seed: Seed = 0,
) -> None:
    """Count outputs that keep their task's format, and refusals, before and after a release.

    \b
    Example:
      python -P -m lorazor.training.study texts --out study/
    """
    from lorazor.training.study.texts import texts as run

    layout = Layout(out)
    run(layout, layout.collected(task, adapter), seed=seed, progress=tell)


def report(out: Out) -> None:
    """Write tables and figures from the CSV files.

    \b
    Example:
      python -P -m lorazor.training.study report --out study/
    """
    from lorazor.training.study.report import report as run

    typer.echo(run(Layout(out), tell))
