"""Servers as child processes: started in a session of their own, and stopped with all their children."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO

HOST = "127.0.0.1"
STOP_SECONDS = 30
KILL_SECONDS = 10


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def start(command: Sequence[str], environment: Mapping[str, str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    """Run a server. Ctrl-C reaches only this process, which then has to `stop` it."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_hear_interrupts,
        env=dict(environment),
    )


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


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM unwind the block as Ctrl-C does, so that no server outlives whoever started it."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
