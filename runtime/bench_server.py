"""The two servers of `lorazor bench`: started, driven, and stopped whatever happens."""

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
from lorazor.runtime.processes import HOST, free_port, start, stop

START_SECONDS = 1200  # a large model that captures its graphs


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


@contextmanager
def serving(name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[Running]:
    """Run `command`, a server, for the length of the block.

    Args:
        name: for messages; "lorazor" is asked for release steps.
        command: program and arguments, to which host and port are added.
        environment: all of it.
        log: its output is appended.

    Raises:
        InputError: it stopped, or did not answer within START_SECONDS; the sentence has the log and its last line.
    """
    begin, port = time.monotonic(), free_port()
    url = f"http://{HOST}:{port}"
    with log.open("ab") as out:
        process = start([*command, "--host", HOST, "--port", str(port)], environment, out)
    try:
        _wait(name, process, url, begin, log)
        yield Running(name, url, process, log, time.monotonic() - begin, name == "lorazor")
    finally:
        stop(process)


def _wait(name: str, process: subprocess.Popen[bytes], url: str, begin: float, log: Path) -> None:
    while not bench_watch.healthy(url):
        if process.poll() is not None:
            raise InputError(f"the {name} server stopped with exit code {process.returncode}; see {log}{_end(log)}")
        if time.monotonic() - begin > START_SECONDS:
            raise InputError(f"the {name} server did not answer within {START_SECONDS} s; see {log}{_end(log)}")
        time.sleep(0.5)


def _end(log: Path) -> str:
    """The log's last line that is not blank, as the end of a sentence."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f", which ends with: {lines[-1]}" if lines else ""
