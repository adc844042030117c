"""Stage `collect`: traces and rollouts of every adapter on its task's policy requests, by `lorazor collect`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lorazor.features.errors import InputError
from lorazor.training.collect import collect as run
from lorazor.training.collect_data import read_rows
from lorazor.training.collect_engine import Engine
from lorazor.training.collect_vllm import VllmEngine
from lorazor.training.config import CollectConfig, load_config
from lorazor.training.finetune_model import load_tokenizer
from lorazor.training.provenance import atomic_write_text
from lorazor.training.study.cells import REQUESTS, ROWS
from lorazor.training.study.layout import ADAPTER_TRAIN, POLICY_PARTS, Cell, Layout

CONFIG = "collect.yaml"
SPARE = 1.25  # room beyond the longest target: a released base may ramble
ROUND = 32


@dataclass(frozen=True)
class Collecting:
    """How it is collected; `limit` is the most requests of each part, for a trial."""

    probe_interval: int = 8
    engine: dict[str, Any] = field(default_factory=dict)
    rollouts: str = "forked"
    shard_size: int = 256
    most_tokens: int = 512
    # One output that differs among a few dozen would put the noise floor above a max-drop of 1 %.
    noise_requests: int = 256
    limit: int | None = None


def collect(
    data: Path,
    layout: Layout,
    base: Path,
    tasks: Iterable[str],
    kinds: Iterable[str],
    how: Collecting,
    progress: Callable[[str], None],
    make_engine: Callable[[CollectConfig], Engine] = VllmEngine,
) -> None:
    """Collect what is not there, going on where a collection was stopped; one engine serves every cell.

    Raises:
        InputError: an adapter is missing, or what `lorazor collect` refuses.
    """
    kinds, engines = list(kinds), list[Engine]()
    cells = [Cell(base.resolve().name, task, kind) for task in tasks for kind in kinds]
    for cell in cells:
        if not layout.adapter(cell).is_dir():
            raise InputError(f"{layout.adapter(cell)} is not there: run the stage adapters first")
    paths = [prepare(data, layout, base, cell, how) for cell in cells]

    def engine(_: CollectConfig) -> Engine:
        """The first collection with something left to do starts it, with the adapters of all."""
        if not engines:
            engines.append(make_engine(union([load_config(path) for path in paths])))
        return engines[0]

    for cell, path in zip(cells, paths, strict=True):
        progress(f"collect: {cell}")
        run(path, path.parent / ROWS, resume=True, engine=engine)


def prepare(data: Path, layout: Layout, base: Path, cell: Cell, how: Collecting) -> Path:
    """Write a cell's requests, with their parts, and the YAML file that collects them; JSON is YAML."""
    folder = layout.collection(cell)
    lines = [
        json.dumps({**row, "part": part}, ensure_ascii=False) + "\n"
        for part in POLICY_PARTS
        for row in rows_of(layout.part(cell.task, part))[: how.limit]
    ]
    atomic_write_text(folder / REQUESTS, "".join(lines))
    name = cell.served_name
    task = {
        "adapter": name,
        "data": REQUESTS,
        "scorer": "lorazor.training.study.taskdata:score",
        "scorer_args": {"folder": str(data.resolve()), "task": cell.task},
        "max_tokens": max_tokens(layout, base, cell.task, how.most_tokens),
    }
    config = {
        **{"base": str(base.resolve()), "adapters": {name: str(layout.adapter(cell).resolve())}},
        **{"tasks": {cell.task: task}, "probe_interval": how.probe_interval, "engine": how.engine},
        **{"shard_size": how.shard_size, "rollouts": how.rollouts, "texts": True},
        "noise": {"requests": how.noise_requests, "concurrency": 16},
    }
    atomic_write_text(folder / CONFIG, json.dumps(config, indent=1) + "\n")
    return folder / CONFIG


def union(configs: list[CollectConfig]) -> CollectConfig:
    """The first configuration with the adapters of all: what one engine for all of them is started with."""
    adapters = {name: path for config in configs for name, path in config.adapters.items()}
    return configs[0].model_copy(update={"adapters": adapters})


def max_tokens(layout: Layout, base: Path, task: str, most: int) -> int:
    """A quarter more than the longest target of the adapter's training data, in steps of 32."""
    tokenizer = load_tokenizer(base)
    targets = [row["target"] for row in rows_of(layout.part(task, ADAPTER_TRAIN))]
    longest = max(len(ids) for ids in tokenizer(targets, add_special_tokens=False)["input_ids"])
    return int(min(most, -(-longest * SPARE // ROUND) * ROUND))


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a part; InputError when it is missing or damaged."""
    return [row for row, _ in read_rows(path)]
