"""The live part of the demo: a server with the policy, a dozen fresh requests of both adapters, what became of them."""

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from demo_requests import Answer, Exchange, active_row_share, ask, split_at_release
from demo_server import ServerError, serving, tail
from openai import OpenAIError
from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text
from tasks import Item, generate, score
from tokenizers import Tokenizer

from lorazor.runtime.processes import HOST, free_port

SEED = 2026  # the traces are of seeds 1 and 2
REQUESTS = 6  # of each adapter
CUT = "▸"
NEVER = {"lorazor_release": "never"}
SHOWN = ("releases_total", "release_step_sum", "rows_total", "probe_seconds_total", "policy_failures_total")
SPEED_NOTE = (
    "One small round of a 135M model on a few CPU cores is no measure of speed, and the CPU has no kernels that gain "
    "from released rows; it shows that the loop works."
)


@dataclass(frozen=True)
class Compared:
    """The policy against never released, over the live requests of one task or of all."""

    name: str
    requests: int
    released: int
    same: int
    policy_score: float
    never_score: float
    share: float


@dataclass(frozen=True)
class Live:
    """All that the server showed; `compared` has a row per task and one for all at the end."""

    machine: str
    exchanges: list[Exchange]
    compared: list[Compared]
    policy_seconds: float
    never_seconds: float
    metrics: list[str]


def run(command: list[str], model: Path, tasks: Sequence[str], log: Path, console: Console) -> Live:
    """Start the server, send the requests, print what happened, and stop the server.

    Raises:
        ServerError: the server does not come up, or a request fails.
    """
    port = free_port()
    pairs = zip(*([(task, item) for item in generate(task, REQUESTS, SEED)] for task in tasks), strict=True)
    items = [request for pair in pairs for request in pair]
    with console.status("") as status:

        def waiting(seconds: float) -> None:
            status.update(f"vLLM starts on {HOST}:{port}: {seconds:.0f} s, usually under a minute (log: {log})")

        console.print(f"vLLM starts on {HOST}:{port}; its log is {log}")
        with serving([*command, "--host", HOST, "--port", str(port)], port, log, waiting) as server:
            console.print(f"ready after {server.seconds:.0f} s")
            try:
                return _talk(server.url, model, items, console, status)
            except (OpenAIError, httpx.HTTPError) as error:
                raise ServerError(f"a request failed ({type(error).__name__}: {error})", tail(log)) from error
            finally:
                status.update("the server stops")


def _talk(url: str, model: Path, items: list[tuple[str, Item]], console: Console, status: Status) -> Live:
    requests: list[tuple[str, list[Any]]] = [(task, list(item["messages"])) for task, item in items]

    def send(what: str, xargs: dict[str, Any]) -> tuple[list[Answer], float]:
        pieces = 0

        def progress() -> None:
            nonlocal pieces
            pieces += 1
            status.update(f"{len(requests)} requests at once, {what}: {pieces} pieces of text")

        return asyncio.run(ask(url, requests, xargs, progress))

    send("to warm up", {})
    released, policy_seconds = send("under the policy", {})
    kept, never_seconds = send("never released", NEVER)
    status.update("all are answered")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    exchanges = []
    for (task, item), policy, never in zip(items, released, kept, strict=True):
        before, after = split_at_release(policy, tokenizer.decode)
        scores = [score(answer.text, item["reference"]) for answer in (policy, never)]
        exchanges.append(Exchange(task, item["messages"][0]["content"], policy, never, before, after, *scores))
    tasks = dict.fromkeys(task for task, _ in items)
    compared = [_compare(task, [e for e in exchanges if e.task == task]) for task in tasks]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    live = Live(
        f"{cores} CPU cores",
        exchanges,
        [*compared, _compare("all", exchanges)],
        policy_seconds,
        never_seconds,
        _metrics(url),
    )
    _print(live, console)
    return live


def _compare(name: str, exchanges: list[Exchange]) -> Compared:
    n = len(exchanges)
    return Compared(
        name,
        n,
        sum(e.released for e in exchanges),
        sum(e.same_text for e in exchanges),
        sum(e.policy_score for e in exchanges) / n,
        sum(e.never_score for e in exchanges) / n,
        active_row_share(exchanges),
    )


def _metrics(url: str) -> list[str]:
    time.sleep(0.5)  # the statistics of the last step arrive a moment after its response
    lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    return [line for line in lines if line.startswith("lorazor_") and line.split("{")[0].split(" ")[0].endswith(SHOWN)]


def _print(live: Live, console: Console) -> None:
    console.print(
        f"Made [dark_orange3 bold]with the adapter[/] {CUT} and [dark_cyan]by the base alone[/], as streamed:\n"
    )
    for e in live.exchanges:
        where = f"released after {e.policy.release_step} of" if e.released else "kept its adapter,"
        text = "same text as never released" if e.same_text else "another text than never released"
        console.print(f"[bold]{e.task}[/]: {where} {e.policy.tokens} tokens; {text}, score {e.policy_score:g}")
        answer = Text.assemble("  ", (e.before, "bold dark_orange3"), CUT if e.released else "", (e.after, "dark_cyan"))
        console.print(answer)
    console.print(_table(live.compared))
    console.print(
        f"{len(live.exchanges)} requests at once, wall-clock: {live.policy_seconds:.1f} s with the policy, "
        f"{live.never_seconds:.1f} s never released.\n{SPEED_NOTE}\nFrom GET /metrics (all rounds, warm-up included):"
    )
    for line in live.metrics:
        console.print(f"  {line}", markup=False, soft_wrap=True)


def _table(rows: list[Compared]) -> Table:
    table = Table()
    table.add_column("task")
    for name in ("requests", "released", "same text", "score", "score, never", "active-row share"):
        table.add_column(name, justify="right")
    for row in rows:
        scores = (f"{row.policy_score:.3f}", f"{row.never_score:.3f}")
        counts = map(str, (row.requests, row.released, row.same))
        table.add_row(row.name, *counts, *scores, f"{row.share:.1%}")
    return table
