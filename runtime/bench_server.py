"""The two servers of `lorazor bench`: started, driven, and stopped whatever happens."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorazor.features.errors import InputError
from lorazor.runtime import bench_watch
from lorazor.runtime.bench_load import drive

HOST = "127.0.0.1"
START_SECONDS = 1200  # a large model that captures its graphs
STOP_SECONDS = 30
KILL_SECONDS = 10


@dataclass(frozen=True)
class Running:
    """A server that answers at `url`; `ours`: it is LoRazor's."""

    name: str
    url: str
    process: subprocess.Popen[bytes]
    log: Path
    seconds: float
    ours: bool

    def run(
        self, sent: Sequence[Mapping[str, Any]], *, rate: float, burstiness: float, concurrency: int | None, seed: int
    ) -> dict[str, Any]:
        """Drive it with `sent` and return vLLM's result, with the release steps, counters and memory of the run.

        Raises:
            InputError: the server stopped meanwhile.
        """
        load = {"rate": rate, "burstiness": burstiness, "concurrency": concurrency, "seed": seed}
        before = self._counters()
        result = drive(self.url, sent, self.log.with_name("load.log"), **load)  # type: ignore[arg-type]
        time.sleep(bench_watch.SETTLE_S)
        counts = bench_watch.grown(before, self._counters())
        ids = [body["request_id"] for body in sent]
        return {
            **result,
            "release_steps": bench_watch.release_steps(self.url, ids) if self.ours else [None] * len(ids),
            "counters": counts,
            "queue_ms": bench_watch.queue_ms(counts),
            "memory": bench_watch.memory(self.process.pid),
        }

    def _counters(self) -> dict[str, float]:
        if self.process.poll() is not None:
            raise InputError(f"the {self.name} server stopped with exit code {self.process.returncode}: see {self.log}")
        return bench_watch.counters(self.url)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[Running]:
    """Run `command`, a server, for the length of the block.

    Args:
        name: for messages; "lorazor" is asked for release steps.
        command: program and arguments, to which host and port are added.
        environment: all of it.
        log: its output is appended.

    Raises:
        InputError: it stopped, or did not answer within START_SECONDS; the sentence names the log.
    """
    begin, port = time.monotonic(), free_port()
    url = f"http://{HOST}:{port}"
    with log.open("ab") as out:
        # A session of its own: Ctrl-C reaches only this process, which then stops the server and all its children.
        process = subprocess.Popen(
            [*command, "--host", HOST, "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_hear_interrupts,
            env=dict(environment),
        )
    try:
        _wait(name, process, url, begin, log)
        yield Running(name, url, process, log, time.monotonic() - begin, name == "lorazor")
    finally:
        stop(process)


def _wait(name: str, process: subprocess.Popen[bytes], url: str, begin: float, log: Path) -> None:
    while not bench_watch.healthy(url):
        if process.poll() is not None:
            raise InputError(f"the {name} server stopped with exit code {process.returncode}; see {log}")
        if time.monotonic() - begin > START_SECONDS:
            raise InputError(f"the {name} server did not answer within {START_SECONDS} s; see {log}")
        time.sleep(0.5)


def _hear_interrupts() -> None:
    """Shells start background jobs deaf to Ctrl-C; a server that inherited that could only be killed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


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
