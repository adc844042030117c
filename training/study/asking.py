"""The requests of the end-to-end stage: encoded as the collection did, all tasks mixed, sent to each arm alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pandas as pd

from lorazor.features.errors import InputError
from lorazor.training.bench import Release, Server, Start
from lorazor.training.bench_workload import Ask, bodies
from lorazor.training.collect_data import Request, encode_prompt, read_requests
from lorazor.training.finetune_model import load_tokenizer
from lorazor.training.losses import Kind
from lorazor.training.study.cells import REQUESTS, Parts
from lorazor.training.study.e2e import live_frame
from lorazor.training.study.layout import TEST, Cell, Layout
from lorazor.training.study.taskdata import score

POLICY, NEVER, STOCK = "policy", "never", "stock"
SERVERS: dict[str, dict[str, Release]] = {"lorazor": {POLICY: None, NEVER: "never"}, "stock": {STOCK: None}}
"""The arms of each server, and what their requests say about releases."""


@dataclass(frozen=True)
class Serving:
    """How it is served; `limit` is the most requests of each task, for a trial."""

    max_drop: float = 0.03
    confidence: float = 0.9
    concurrency: int = 64
    options: str = ""
    kind: Kind = "relative"
    limit: int | None = None
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Sent:
    """One request with all that is posted of it but its release."""

    cell: Cell
    request: Request
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Mapping[str, Any]


def mixed(layout: Layout, base: Path, parts: Sequence[Parts], how: Serving) -> list[Sent]:
    """The test requests of all tasks in an order that the seed fixes, encoded and sampled as they were collected."""
    tokenizer = load_tokenizer(base)
    found = []
    for part in parts:
        task, path = part.cell.task, layout.collection(part.cell) / REQUESTS
        about = part.traces[TEST].meta.tasks[task]
        sampling = {name: value for name, value in about.sampling.items() if name != "seed"}
        requests = [request for request in read_requests(path, task) if request.row["part"] == TEST]
        for request in requests[: how.limit]:
            prompt = tuple(encode_prompt(tokenizer, request.row))
            found.append(Sent(part.cell, request, prompt, about.max_tokens, sampling))
    Random(how.seed).shuffle(found)
    return found


def answers(
    start: Start, sent: Sequence[Sent], data: Path, how: Serving, progress: Callable[[str], None]
) -> Iterator[tuple[str, tuple[pd.DataFrame, float]]]:
    """Each arm's answers and how many seconds they took; a server warms up on its first requests."""
    for name, arms in SERVERS.items():
        progress(f"  the {name} server starts")
        with start(name) as server:
            ask(server, sent[: how.concurrency], "warm-up", None, how)
            for arm, release in arms.items():
                progress(f"  {arm}: {len(sent):,} requests, {how.concurrency} at a time")
                found = ask(server, sent, arm, release, how)
                yield arm, (scored(sent, found, data), float(found["duration"]))


def ask(server: Server, sent: Sequence[Sent], run: str, release: Release, how: Serving) -> dict[str, Any]:
    """Send the requests, `concurrency` at a time; InputError for one that is not answered."""
    asks = [Ask(list(one.prompt), one.cell.served_name, one.max_tokens, None) for one in sent]
    made = bodies(asks, run, fixed=False, release=release)
    # The sampling is written out, because a server takes what a request leaves open from the model's own defaults.
    posted = [{**body, **one.sampling} for body, one in zip(made, sent, strict=True)]
    found = server.run(posted, rate=float("inf"), burstiness=1.0, concurrency=how.concurrency, seed=how.seed)
    for one, error in zip(sent, found["errors"], strict=True):
        if error:
            raise InputError(f"request {one.request.id} of the run {run!r} was not answered: {error.splitlines()[-1]}")
    return found


def scored(sent: Sequence[Sent], found: Mapping[str, Any], data: Path) -> pd.DataFrame:
    """See `live_frame`."""
    texts = zip(sent, found["generated_texts"], strict=True)
    scores = [score(text, one.request.row, folder=str(data.resolve()), task=one.cell.task) for one, text in texts]
    return live_frame([one.request.id for one in sent], found, scores)
