"""Starts `lorazor serve` for the demo, waits until it answers, and leaves no process behind, whatever happens."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

HOST = "127.0.0.1"
START_SECONDS = 300
STOP_SECONDS = 30
KILL_SECONDS = 5


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


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


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
        # A session of its own: Ctrl-C reaches only the demo, which then stops the server and all its children.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_hear_interrupts,
            env={"VLLM_NO_USAGE_STATS": "1", **os.environ},
        )
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


def _hear_interrupts() -> None:
    """Shells start background jobs deaf to Ctrl-C; a server that inherited that could only be killed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def healthy(url: str) -> bool:
    """Whether GET /health says so."""
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def tail(log: Path, lines: int = 25) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ctrl-C for the process group, and SIGKILL for what is left of it after STOP_SECONDS or at a second Ctrl-C."""
    try:
        _signal(process, signal.SIGINT, STOP_SECONDS)
    finally:
        _signal(process, signal.SIGKILL, KILL_SECONDS)
        process.wait()


def _signal(process: subprocess.Popen[bytes], number: int, seconds: float) -> None:
    """Send a signal to the process group and wait until the group is empty, at most so many seconds."""
    deadline = time.monotonic() + seconds
    try:
        os.killpg(process.pid, number)
        while time.monotonic() < deadline:
            process.poll()  # reaps it, so that the group can become empty
            os.killpg(process.pid, 0)
            time.sleep(0.1)
    except ProcessLookupError:
        pass  # nothing is left
