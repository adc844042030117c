"""Starts `lorazor serve` for the demo, waits until it answers, and leaves no process behind, whatever happens."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lorazor.runtime.bench_watch import healthy
from lorazor.runtime.processes import HOST, start, stop

START_SECONDS = 300


class ServerError(Exception):
    """The server did not come up; the message is a sentence, `tail` the end of its log."""

    def __init__(self, message: str, tail: str) -> None:
        super().__init__(message)
        self.tail = tail


@dataclass(frozen=True)
class Server:
    """A server that answers at `url`, `seconds` after it was started."""

    url: str
    seconds: float


@contextmanager
def serving(
    command: list[str], port: int, log: Path, waiting: Callable[[float], None] = lambda _: None
) -> Iterator[Server]:
    """Run `command`, a server on `port`, for the length of the block; its output goes to `log`.

    Args:
        command: program and arguments.
        port: where GET /health is asked for.
        log: replaced if it is there.
        waiting: called about twice a second with the seconds so far.

    Raises:
        ServerError: it stopped, or did not answer within START_SECONDS.
    """
    begin = time.monotonic()
    with log.open("wb") as out:
        process = start(command, {"VLLM_NO_USAGE_STATS": "1", **os.environ}, out)
    try:
        url = f"http://{HOST}:{port}"
        while not healthy(url):
            seconds = time.monotonic() - begin
            if process.poll() is not None:
                raise ServerError(f"the server stopped with exit code {process.returncode}", tail(log))
            if seconds > START_SECONDS:
                raise ServerError(f"the server did not answer within {START_SECONDS} s", tail(log))
            waiting(seconds)
            time.sleep(0.5)
        yield Server(url, time.monotonic() - begin)
    finally:
        stop(process)


def tail(log: Path, lines: int = 25) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
