"""How the demo starts and stops its server: real processes, with a plain HTTP server in vLLM's place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from examples.demo_server import ServerError, serving
from lorazor.runtime.processes import free_port

# A server with a child, as vLLM has; the child of a server that is told to is deaf to Ctrl-C.
PROGRAM = """
import http.server, subprocess, sys
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
deaf = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(300)"
child = subprocess.Popen([sys.executable, "-c", deaf] if "deaf" in sys.argv else ["sleep", "300"])
print(child.pid, flush=True)
try:
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def gone(pid: int) -> bool:
    """Whether a process has ended; as a zombie nobody has reaped it yet, but it runs no more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1].startswith("Z")
    except FileNotFoundError:
        return True


def first_number(log: Path) -> int:
    """The process id that a program wrote on the first line of its log."""
    return int(log.read_text().split()[0])


def test_server_is_awaited_and_stopped_with_its_children(tmp_path: Path) -> None:
    """The block runs once the server answers; afterwards neither it nor its child is there, by Ctrl-C."""
    port, log = free_port(), tmp_path / "log"
    with serving([sys.executable, "-c", PROGRAM, str(port)], port, log) as server:
        assert server.url == f"http://127.0.0.1:{port}"
        child = first_number(log)
        assert not gone(child)
    assert gone(child)
    assert log.read_text().splitlines()[-1] == "interrupted"


def test_server_hears_ctrl_c_when_its_parent_does_not(tmp_path: Path) -> None:
    """Started from a background job, which ignores Ctrl-C, the server is still stopped by it and not killed."""
    port, log = free_port(), tmp_path / "log"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with serving([sys.executable, "-c", PROGRAM, str(port)], port, log):
            pass
    finally:
        signal.signal(signal.SIGINT, before)
    assert log.read_text().splitlines()[-1] == "interrupted"


def test_server_is_stopped_when_the_block_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens inside, no process is left, deaf ones included, and the exception is not swallowed."""
    monkeypatch.setattr("lorazor.runtime.processes.STOP_SECONDS", 2)
    port, log = free_port(), tmp_path / "log"
    with (
        pytest.raises(KeyboardInterrupt),
        serving([sys.executable, "-c", PROGRAM, str(port), "deaf"], port, log),
    ):
        raise KeyboardInterrupt
    assert gone(first_number(log))


def test_server_that_stops_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    """A server that ends before it answers is an error that carries its exit code and the last lines of the log."""
    program = "import sys\nfor line in range(100): print('line', line, flush=True)\nsys.exit('no model')"
    with pytest.raises(ServerError, match="exit code 1") as caught, serving(
        [sys.executable, "-c", program], free_port(), tmp_path / "log"
    ):  # fmt: skip
        pytest.fail("the block must not run")
    assert "no model" in caught.value.tail
    assert "line 99" in caught.value.tail
    assert "line 9\n" not in caught.value.tail


def test_demo_stopped_while_its_server_starts_leaves_nothing(tmp_path: Path) -> None:
    """SIGTERM to a demo that still waits for its server ends both."""
    examples = Path(__file__).parents[2] / "examples"
    log = tmp_path / "log"
    program = (
        "import signal, sys\nfrom pathlib import Path\nimport demo\nfrom demo_server import serving\n"
        "signal.signal(signal.SIGTERM, demo._leave)\n"
        "slow = 'import os, time; print(os.getpid(), flush=True); time.sleep(300)'\n"
        f"with serving([sys.executable, '-c', slow], 1, Path({str(log)!r})): pass\n"
    )
    env = {**os.environ, "PYTHONPATH": str(examples)}
    process = subprocess.Popen([sys.executable, "-c", program], env=env, cwd=tmp_path)
    deadline = time.monotonic() + 60
    while not (log.exists() and log.read_text().endswith("\n")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    assert gone(first_number(log))
