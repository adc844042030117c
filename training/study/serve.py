"""Stage `serve`: every adapter of a kind on one real server, under the tuned policy, never released, and stock.

The requests are those of the test split, all tasks mixed, with outputs as long as the model makes them. What the server
does is compared with what replay says of the same requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lorazor.features.errors import InputError
from lorazor.policy.artifact import Artifact
from lorazor.training.bench import Start
from lorazor.training.replay import ReplayTable
from lorazor.training.study.asking import NEVER, POLICY, Sent, Serving, answers, mixed
from lorazor.training.study.cells import Parts, load_parts
from lorazor.training.study.e2e import against_replay, noise_of, numbers, replay_frame
from lorazor.training.study.kind_policy import kind_policy
from lorazor.training.study.layout import TEST, Cell, Layout
from lorazor.training.study.policies import measured_noise
from lorazor.training.study.results import Results

EVERY = "all"
MakeServers = Callable[[Path, Mapping[str, Path], Path, Path, str, int], Start]
"""See `servers.servers_of`."""


def serve(
    data: Path,
    layout: Layout,
    base: Path,
    cells: Sequence[Cell],
    how: Serving,
    progress: Callable[[str], None],
    make_servers: MakeServers,
) -> None:
    """Add every kind of the cells, which are of one backbone, to e2e.csv; one without a policy is told and left out.

    Raises:
        InputError: a server that does not start, stops, or does not answer a request.
    """
    table = Results(layout.csv("e2e"))
    for kind in dict.fromkeys(cell.adapter for cell in cells):
        mine = [cell for cell in cells if cell.adapter == kind]
        key = {"backbone": mine[0].backbone, "adapter": kind}
        if table.has(key):
            continue
        progress(f"serve: {mine[0].backbone} · {kind}: {', '.join(cell.task for cell in mine)}")
        parts, folder = [load_parts(layout, cell, how.seed) for cell in mine], layout.served(mine[0])
        sent = mixed(layout, base, parts, how)
        adapters = {cell.served_name: layout.adapter(cell) for cell in mine}
        # Before the policy, which takes minutes: options that vLLM refuses are told at once.
        start = make_servers(base, adapters, folder / "policy", folder, how.options, len(sent))
        promise: dict[str, Any] = {"kind": how.kind, "max_drop": how.max_drop, "confidence": how.confidence}
        try:
            artifact = kind_policy(folder / "policy", parts, **promise, seed=how.seed, progress=progress)
        except InputError as error:
            progress(f"  left out: {error}")
            continue
        arms = dict(answers(start, sent, data, how, progress))
        table.add({**key, **row} for row in rows(sent, arms, parts, artifact, how))


def rows(
    sent: Sequence[Sent],
    arms: Mapping[str, tuple[pd.DataFrame, float]],
    parts: Sequence[Parts],
    artifact: Artifact,
    how: Serving,
) -> Iterator[dict[str, Any]]:
    """A row per task and arm, and per arm one of all tasks, which has the rates."""
    task_of = pd.Series([one.cell.task for one in sent], index=[one.request.id for one in sent])
    noise = {part.cell.task: found for part in parts if (found := measured_noise(part)) is not None}
    never, replays = arms[NEVER][0], replayed(parts, artifact)
    for arm, (live, seconds) in arms.items():
        for task in (*task_of.unique(), EVERY):
            some = live if task == EVERY else live[task_of == task]
            rates = {"requests_per_s": len(live) / seconds, "tokens_per_s": live["tokens"].sum() / seconds}
            yield {
                **{"task": task, "arm": arm, "concurrency": how.concurrency},
                **(tuned_to(artifact, task, how) if arm == POLICY else {}),
                **numbers(some, never),
                **(rates if task == EVERY else {}),
                **against_replay(some, replays.get(arm, replays[NEVER])),
                **noise_of(noise, list(task_of[some.index])),
            }


def replayed(parts: Sequence[Parts], artifact: Artifact) -> dict[str, pd.DataFrame]:
    """What replay says of the test requests under the artifact and never released, by arm."""
    frames: dict[str, list[pd.DataFrame]] = {POLICY: [], NEVER: []}
    for part in parts:
        task = artifact.manifest.tasks[part.cell.task]
        table = ReplayTable.from_traces(part.traces[TEST], part.cell.task, task.mean_output_tokens)
        scores = artifact.scorer.score(table.features) if len(table.step) else np.empty(0)
        for arm, threshold in ((POLICY, task.threshold), (NEVER, None)):
            frames[arm].append(replay_frame(table, table.outcome(table.first_decision(scores, threshold))))
    return {arm: pd.concat(found) for arm, found in frames.items()}


def tuned_to(artifact: Artifact, task: str, how: Serving) -> dict[str, Any]:
    """What the policy was tuned to, and a task's threshold (empty: never)."""
    known = artifact.manifest.tasks
    threshold = known[task].threshold if task in known else None
    return {"loss_kind": how.kind, "max_drop": how.max_drop, "confidence": how.confidence, "threshold": threshold}
