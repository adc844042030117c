"""`lorazor bench` at its edges: bad input, servers that fail or must be stopped, and one whole run on a tiny model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lorazor.features.errors import InputError
from lorazor.runtime.bench_server import serving
from lorazor.runtime.cli import main
from tests.runtime.serving import write_adapter_folder
from tests.runtime.tiny import make_tiny

PROGRAM = Path(sys.executable).with_name("lorazor")
# Answers /health; its child would outlive it if it were only told to stop.
FAKE_SERVER = """
import http.server, subprocess, sys
deaf = "import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", deaf])
print(child.pid, flush=True)
class Ok(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"vllm:num_preemptions_total 0\\n")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Ok).serve_forever()
"""


@pytest.fixture
def adapter(tmp_path: Path) -> str:
    """An adapter folder that passes for one until its weights are read."""
    return f"a={write_adapter_folder(tmp_path / 'a', config={'r': 8})}"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], ["no adapter", "--adapter NAME=PATH"]),
        (["--adapter", "a=/none/a"], ["--adapter", "/none/a"]),
        (["--workload", "tall"], ["--workload", "tall"]),
        (["--adapter", "ADAPTER", "--arrivals", "poisson"], ["--rate"]),
        (["--adapter", "ADAPTER", "--rounds", "0"], ["--rounds", "0"]),
        (["--adapter", "ADAPTER", "--requests", "-3"], ["--requests", "-3"]),
        (["--adapter", "ADAPTER", "--release-steps", "often"], ["--release-steps", "often"]),
        (["--adapter", "ADAPTER", "--policy", "p", "--never", "0.2"], ["--policy", "--never"]),
        (["--adapter", "ADAPTER", "--policy", "/none/p"], ["/none/p"]),
        (["--adapter", "ADAPTER", "--prompts", "/none/p.jsonl"], ["/none/p.jsonl"]),
        (["--adapter", "ADAPTER", "--stock-options", "'"], ["--stock-options"]),
    ],
)
def test_bad_input_is_one_sentence(
    argv: list[str], words: list[str], adapter: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, one sentence that names what is wrong, and no folder."""
    out = tmp_path / "out"
    given = [adapter if word == "ADAPTER" else word for word in argv]
    assert main(["bench", "/none/base", *given, "--out", str(out)]) == 2
    captured = capsys.readouterr()
    last = captured.err.splitlines()[-1]
    assert last.startswith("lorazor: ")
    assert all(word in last for word in words)
    assert not out.exists()


def test_results_are_not_overwritten(adapter: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that holds the results of another bench is refused before anything starts."""
    (tmp_path / "results.json").write_text("{}")
    assert main(["bench", "m", "--adapter", adapter, "--out", str(tmp_path)]) == 2
    assert "choose another folder" in capsys.readouterr().err
    assert (tmp_path / "results.json").read_text() == "{}"


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--max-modell-len", "64"], ["vLLM refuses", "--max-modell-len"]),
        (["--port", "8000"], ["--port", "itself"]),
        (["--data-parallel-size", "2"], ["single engines", "--data-parallel-size is 2"]),
        (["--max-model-len", "64"], ["--max-model-len 64", "384"]),
    ],
)
def test_bad_engine_options(
    options: list[str], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Options that vLLM refuses, that the bench sets itself, or that leave no room, are told before a server starts."""
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    adapter = write_adapter_folder(tmp_path / "a", config={"r": 8})
    assert main(["bench", str(base), "--adapter", f"a={adapter}", "--out", str(tmp_path / "o"), "--", *options]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert all(word in last for word in words)
    assert not (tmp_path / "o").exists()


@pytest.mark.vllm
def test_both_servers_get_the_same_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock has what `lorazor serve` would complete, no plugin of ours, and its own choice of runner."""
    from lorazor.runtime.bench_options import engine_of, lorazor_command, stock_command, stock_environment

    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    monkeypatch.setenv("VLLM_PLUGINS", "mine,lorazor")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    (tmp_path / "config.json").write_text("{}")
    adapters = {name: write_adapter_folder(tmp_path / name, config={"r": 32}) for name in "abc"}
    before = dict(os.environ)
    engine = engine_of(str(tmp_path), adapters, ["--max-num-seqs", "7", "--load-format", "dummy"])
    assert dict(os.environ) == before
    stock = stock_command(str(tmp_path), engine, ["--max-loras", "64"])
    ours = lorazor_command(str(tmp_path), engine, "policy")
    common = " ".join(engine.flags)
    assert "--enable-lora --max-loras 3 --max-lora-rank 32" in common
    assert common in " ".join(stock)
    assert common in " ".join(ours)
    assert stock[-2:] == ["--max-loras", "64"]
    assert ours[-2:] == ["--policy", "policy"]
    assert stock_environment(engine.environment)["VLLM_PLUGINS"] == "mine"
    assert {"VLLM_API_KEY", "VLLM_USE_V2_MODEL_RUNNER"}.isdisjoint(engine.environment)
    assert engine.dummy


def gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, InputError])
def test_servers_are_stopped(
    error: type[BaseException] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the block ends, the server is gone, with the child that does not hear Ctrl-C; the log stays."""
    monkeypatch.setattr("lorazor.runtime.processes.STOP_SECONDS", 1)
    log = tmp_path / "s.log"

    def block() -> int:
        with serving("fake", [sys.executable, "-c", FAKE_SERVER], os.environ, log) as server:
            assert not gone(int(log.read_text().split()[0]))
            if error is not None:
                raise error("now")
            return server.process.pid

    if error is None:
        assert gone(block())
    else:
        with pytest.raises(error):
            block()
    assert gone(int(log.read_text().split()[0]))


def test_a_server_that_does_not_start_names_its_log(tmp_path: Path) -> None:
    """The sentence has the exit code and the log, which holds what the server said."""
    log = tmp_path / "stock.log"
    command = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]
    with pytest.raises(InputError, match=rf"the stock server stopped with exit code 3; see {log}"):
        serving("stock", command, os.environ, log).__enter__()
    assert "no such model" in log.read_text()


def test_a_server_that_dies_during_a_run_names_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters of a dead server are not asked for."""
    monkeypatch.setattr("lorazor.runtime.processes.STOP_SECONDS", 1)
    log = tmp_path / "s.log"
    with serving("stock", [sys.executable, "-c", FAKE_SERVER], os.environ, log) as server:
        server.process.kill()
        server.process.wait()
        with pytest.raises(InputError, match=rf"stock server stopped with exit code -9.*{log}"):
            server.run([], rate=1.0, burstiness=1.0, concurrency=None, seed=0)


def environment() -> dict[str, str]:
    """The environment of a user: without what the other tests set for engines in their own process."""
    return {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}


def servers_of(out: Path) -> list[str]:
    """Command lines of processes that serve for the bench in `out`, by the model folder beside it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if str(out.parent / "base") in line:
            found.append(line)
    return found


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A bench of a tiny model with two adapters, as short as one can be; --out is its last word."""
    folder = Path(tmp_path_factory.mktemp("bench"))
    tiny = make_tiny(folder, {"a": 8, "b": 16})
    adapters = [word for name, path in tiny.adapters.items() for word in ("--adapter", f"{name}={path}")]
    sizes = ["--requests", "6", "--concurrency", "4", "--prompt-tokens", "12", "--output-tokens", "24"]
    engine = ["--enforce-eager", "--max-model-len", "64", "--max-num-seqs", "4", "--kv-cache-memory-bytes", "64000000"]
    processes = ["--api-server-count", "2"]
    return [
        str(PROGRAM),
        "bench",
        tiny.base,
        *adapters,
        *sizes,
        "--rounds",
        "1",
        "--out",
        str(folder / "out"),
        "--",
        *engine,
        *processes,
    ]


@pytest.mark.vllm
@pytest.mark.slow
def test_a_whole_bench(command: list[str]) -> None:
    """Both servers answer all of the same requests; shares, ratios and page are there, and no server stays."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment())
    assert done.returncode == 0, done.stderr[-3000:]
    out = Path(command[command.index("--out") + 1])
    results: dict[str, Any] = json.loads((out / "results.json").read_text())
    rounds = {record["arm"]: record for record in results["rounds"]}
    assert set(rounds) == {"stock", "released", "never"}
    assert len({record["requests_sha256"] for record in rounds.values()}) == 1
    for record in rounds.values():
        assert (record["completed"], record["failed"], record["output_lens"]) == (6, 0, [24] * 6)
        assert all(record[f"p99_{name}_ms"] > 0 for name in ("ttft", "tpot", "itl"))
        assert record["memory"]["peak_rss"] > 0
    # Float32 on a CPU: never released is stock's text, and a release is another one.
    assert rounds["never"]["same_text_as_stock"] == 1
    assert rounds["released"]["same_text_as_stock"] < 1
    assert rounds["released"]["release_steps"] != [None] * 6
    assert all(step is None or 1 <= step <= 8 for step in rounds["released"]["release_steps"])
    share = rounds["released"]["active_row_share"]
    assert 0 <= share < rounds["never"]["active_row_share"] == 1
    assert sum(value for key, value in rounds["released"]["counters"].items() if "releases_total" in key) > 0
    assert [row["arm"] for row in results["ratios"]] == ["released", "never"]
    assert all(row["output_throughput"]["median"] > 0 for row in results["ratios"])
    assert results["servers"]["stock"]["kv_blocks"] == results["servers"]["lorazor"]["kv_blocks"] > 0
    assert "<svg" in (out / "report.html").read_text()
    assert {path.name for path in (out / "logs").iterdir()} == {"stock.log", "lorazor.log", "load.log"}
    assert servers_of(out) == []


@pytest.mark.vllm
@pytest.mark.slow
def test_an_interrupted_bench_leaves_no_server(command: list[str]) -> None:
    """SIGTERM, which unwinds as Ctrl-C does, while a server starts: exit code 130, no results, its log, no process."""
    out = Path(command[command.index("--out") + 1]).with_name("stopped")
    argv = [str(out) if word == command[command.index("--out") + 1] else word for word in command]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment())
    deadline = time.monotonic() + 120
    while not (out / "logs" / "stock.log").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 130
    assert [path.name for path in out.iterdir()] == ["logs"]
    assert servers_of(out) == []
