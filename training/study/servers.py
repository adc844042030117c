"""The servers of the end-to-end stage: LoRazor's and stock vLLM's with the same options, as `lorazor bench` has them.

The one place where training starts a server; it runs in another process, and vLLM's own parser and load generator are
called by `runtime/`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from lorazor.features.errors import InputError
from lorazor.runtime import bench_options
from lorazor.runtime.bench_server import serving
from lorazor.runtime.cli_text import words
from lorazor.runtime.processes import terminated_as_interrupted
from lorazor.runtime.reports import KEPT_REPORTS
from lorazor.training.bench import Server, Start


def servers_of(
    base: Path, adapters: Mapping[str, Path], policy: Path, logs: Path, options: str, requests: int
) -> Start:
    """What starts the server "lorazor" or "stock" for the length of a block; it is stopped however the block ends.

    Args:
        adapters: by the name that they are served under.
        policy: of the server "lorazor".
        logs: a folder for NAME.log.
        options: more of `vllm serve`, for both servers, as one text.
        requests: how many will be sent at once.

    Raises:
        InputError: no vLLM, options that it refuses, or more requests than a server remembers release steps of.
    """
    if requests > KEPT_REPORTS:
        raise InputError(f"a server remembers {KEPT_REPORTS:,} release steps, got {requests:,} requests: set --limit")
    bench_options.import_vllm()
    modules = {name: str(path.resolve()) for name, path in adapters.items()}
    engine = bench_options.engine_of(str(base.resolve()), modules, words("--serve-args", options))

    @contextmanager
    def start(name: str) -> Iterator[Server]:
        command, environment = bench_options.launch(name, str(base.resolve()), engine, str(policy.resolve()))
        logs.mkdir(parents=True, exist_ok=True)
        with terminated_as_interrupted(), serving(name, command, environment, logs / f"{name}.log") as server:
            yield server

    return start
