"""Engines in processes of their own that take turns, and what every row of a benchmark's CSV carries."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lorazor.training.provenance import git_sha

CHILD = Path(__file__).parent / "engine_child.py"


class Engine:
    """A vLLM engine in another process; `log` receives everything else that it prints."""

    def __init__(
        self, options: dict[str, Any], adapters: dict[str, str], log: Path, environment: dict[str, str] | None = None
    ) -> None:
        """Start it; `wait` says when it runs."""
        self._log = log.open("w")
        self._child = subprocess.Popen(
            [sys.executable, "-P", str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        self._send({"engine": options, "adapters": adapters})

    def _send(self, message: dict[str, Any]) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(message) + "\n")
        self._child.stdin.flush()

    def wait(self) -> dict[str, Any]:
        """The next answer. Raises RuntimeError if the engine ends before it gives one."""
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if line.startswith(">>> "):
                answer: dict[str, Any] = json.loads(line[4:])
                return answer
            self._log.write(line)
        raise RuntimeError(f"an engine ended without an answer; see {self._log.name}")

    def run(self, **job: Any) -> dict[str, Any]:
        """Do one job (see engine_child.py) and return its answer."""
        self._send(job)
        return self.wait()

    def close(self) -> None:
        """End it."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait(timeout=60)
        self._log.close()


def provenance() -> dict[str, object]:
    """The columns that say where, when and with what a row was measured."""
    import torch

    found: dict[str, object] = {"date": datetime.now(UTC).isoformat(timespec="seconds")}
    for package in ("torch", "triton", "vllm"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = ""
    # A copy without its git folder is told the revision.
    revision = os.environ.get("GIT_REVISION") or git_sha(Path(__file__).parent)
    words = " ".join(word.rsplit("/", 1)[-1] for word in sys.argv)
    return found | {"gpu": torch.cuda.get_device_name(), "argv": words, "git": revision}


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    """All rows, as one CSV that is replaced as a whole."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", newline="") as file:
        table = csv.DictWriter(file, names)
        table.writeheader()
        table.writerows(rows)
    os.replace(temporary, path)


def run_tests(name: str = "") -> None:
    """The kernels' tests on the GPU, all or those of one file; ends the program if they fail."""
    tests = Path(__file__).parent.parent / "tests" / "kernels" / name
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-x", "-m", "gpu", "-p", "no:cacheprovider", str(tests)]
    if subprocess.run(command, check=False).returncode:
        sys.exit("The kernels' tests fail: no speed is shown.")
