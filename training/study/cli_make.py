"""The stages that make adapters and traces: split, adapters, diagnose and collect."""

from typing import Annotated

import typer

from lorazor.training.study.layout import KINDS, Cell, Layout
from lorazor.training.study.options import Base, Data, Kinds, Limit, Out, Seed, Tasks, json_object, known, tell


def split(
    data: Data,
    out: Out,
    task: Tasks = [],  # noqa: B006
    policy_train: Annotated[int, typer.Option(min=1, help="Prompts to train the policy on.")] = 1000,
    calibrate: Annotated[int, typer.Option(min=1, help="Prompts to calibrate thresholds on.")] = 4000,
    calibrate_least: Annotated[int, typer.Option(min=1, help="The same, where data are scarce.")] = 1000,
    test: Annotated[int, typer.Option(min=1, help="Prompts to test on.")] = 1000,
    validation: Annotated[int, typer.Option(min=1, help="Prompts to validate adapters on.")] = 300,
    adapter_share: Annotated[float, typer.Option(min=0.01, max=0.95, help="Least share for the adapters.")] = 0.4,
    seed: Seed = 0,
) -> None:
    """Divide each task's items by prompt.

    \b
    Example:
      python -P -m lorazor.training.study split --data data/ --out study/
    """
    from lorazor.training.study.split import Sizes
    from lorazor.training.study.split import split as run
    from lorazor.training.study.taskdata import task_module

    sizes = Sizes(policy_train, calibrate, test, validation, adapter_share, calibrate_least)
    names = list(task_module(data).TASKS)
    run(data, Layout(out), known(task, names, "task") or names, sizes=sizes, seed=seed, progress=tell)


def adapters(
    base: Base,
    out: Out,
    task: Tasks = [],  # noqa: B006
    adapter: Kinds = [],  # noqa: B006
    options: Annotated[
        str, typer.Option(metavar="JSON", help='Of lorazor finetune, such as {"lr": 1e-3, "bf16": true}.')
    ] = "{}",
    init_from: Annotated[
        str | None, typer.Option(metavar="KIND", help="Other kinds go on from the task's adapter of this one.")
    ] = None,
) -> None:
    """Train the adapters, one after the other, each until validation stops improving.

    \b
    Example:
      python -P -m lorazor.training.study adapters --base models/base --out study/ --options '{"epochs": 20}'
    """
    from lorazor.training.study.adapters import adapters as run

    layout, kinds = Layout(out), known(adapter, KINDS, "adapter") or KINDS
    if init_from is not None:
        known([init_from], KINDS, "adapter")
    run(layout, base, layout.split_tasks(task), kinds, json_object(options, "--options"), tell, init_from)


def diagnose(
    base: Base,
    out: Out,
    task: Tasks = [],  # noqa: B006
    adapter: Kinds = [],  # noqa: B006
    requests: Annotated[int, typer.Option(min=1, help="Of the test part, for each adapter.")] = 256,
    release: Annotated[int, typer.Option(min=1, help="Release step of the released path.")] = 1,
    batch: Annotated[int, typer.Option(min=1)] = 32,
    most_tokens: Annotated[int, typer.Option(min=1, help="The longest output.")] = 256,
) -> None:
    """Force each adapter's own output through the released path: which tokens change.

    \b
    Example:
      python -P -m lorazor.training.study diagnose --base models/base --out study/
    """
    from lorazor.training.study.diagnose import Diagnosis
    from lorazor.training.study.diagnose import diagnose as run

    layout = Layout(out)
    cells = [
        Cell(base.resolve().name, name, kind)
        for name in layout.split_tasks(task)
        for kind in known(adapter, KINDS, "adapter") or KINDS
    ]
    run(layout, base, cells, Diagnosis(requests, release, batch, most_tokens), tell)


def collect(
    data: Data,
    base: Base,
    out: Out,
    task: Tasks = [],  # noqa: B006
    adapter: Kinds = [],  # noqa: B006
    probe_interval: Annotated[int, typer.Option(min=1, help="g.")] = 8,
    engine: Annotated[str, typer.Option(metavar="JSON", help='Of vLLM, such as {"dtype": "bfloat16"}.')] = "{}",
    most_tokens: Annotated[int, typer.Option(min=1, help="The longest output.")] = 512,
    shard_size: Annotated[int, typer.Option(min=1, help="Requests that are run together and kept together.")] = 256,
    limit: Limit = None,
) -> None:
    """Record traces and rollouts of every adapter, with vLLM; one that was stopped goes on.

    \b
    Example:
      python -P -m lorazor.training.study collect --data data/ --base models/base --out study/
    """
    from lorazor.training.study.collecting import Collecting
    from lorazor.training.study.collecting import collect as run

    layout, kinds = Layout(out), known(adapter, KINDS, "adapter") or KINDS
    how = Collecting(
        probe_interval, json_object(engine, "--engine"), shard_size=shard_size, most_tokens=most_tokens, limit=limit
    )
    run(data, layout, base, layout.split_tasks(task), kinds, how, tell)
