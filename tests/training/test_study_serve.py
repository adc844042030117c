"""The end-to-end stage: its comparison with replay on planted traces, and real servers of a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from lorazor.features.errors import InputError
from lorazor.policy.artifact import load_artifact
from lorazor.training.bench import Start
from lorazor.training.study.asking import Serving
from lorazor.training.study.cells import load_parts
from lorazor.training.study.cli import main
from lorazor.training.study.e2e import against_replay, live_frame, noise_of, numbers
from lorazor.training.study.kind_policy import joined
from lorazor.training.study.layout import Cell, Layout
from lorazor.training.study.serve import replayed, serve
from lorazor.training.traces import Noise
from tests.planted import planted_meta
from tests.runtime.tiny import make_tiny
from tests.training.study_folder import plant

SQL, CHAT = (Cell("base", task, "ordinary") for task in ("sql", "chat"))
SCORE_IS_TEXT = """
TASKS = ("sql", "chat")
def load(task, split): return []
def score(task, text, example): return {"score": float(text)}
"""

# What an adapter is worth shows in the first characters, so a release after them harms nobody.
SCORE_OF_BEGINNING = """
TASKS = ("sql", "chat")
def load(task, split):
    numbers = range(80) if split == "train" else range(80, 160)
    return [{"prompt": f"{task} number {n:03d}=", "target": "x" * 24} for n in numbers]
def score(task, text, example): return {"score": float(sum(map(ord, text[4:12])) % 2)}
"""


class Replaying:
    """Stands in for both servers: answers every request as replay says, but for `wrong` of each run's first ones."""

    def __init__(self, layout: Layout, wrong: int = 0) -> None:
        self.layout, self.wrong = layout, wrong
        self.runs: list[tuple[str, Sequence[Mapping[str, Any]], dict[str, Any]]] = []
        self.up: list[str] = []

    def make(self, base: Path, adapters: Mapping[str, Path], policy: Path, logs: Path, options: str, n: int) -> Start:
        """As `servers_of`."""

        @contextmanager
        def start(name: str) -> Iterator[Any]:
            self.up.append(name)
            parts = [load_parts(self.layout, cell, 0) for cell in (SQL, CHAT)]
            self.known = replayed(parts, load_artifact(policy))
            yield SimpleNamespace(run=lambda sent, **load: self.answer(name, sent, load))
            self.up.remove(name)

        return start

    def answer(self, name: str, sent: Sequence[Mapping[str, Any]], load: dict[str, Any]) -> dict[str, Any]:
        """The keys of vLLM's result; a text is its score, half a second for the first token and 10 ms for others."""
        self.runs.append((name, sent, load))
        releases = name == "lorazor" and "vllm_xargs" not in sent[0]
        ids = [f"{body['model'].partition('-')[0]}/{''.join(map(chr, body['prompt']))}" for body in sent]
        found = self.known["policy" if releases else "never"].loc[ids]
        scores, steps = (found[name].to_numpy(copy=True) for name in ("score", "release"))
        if releases:
            scores[: self.wrong] = 1 - scores[: self.wrong]
            steps[: self.wrong] = 2
        return {
            "output_lens": list(found["tokens"]),
            "itls": [[0.01] * (n - 1) for n in found["tokens"]],
            "ttfts": [0.5] * len(ids),
            "errors": [""] * len(ids),
            "generated_texts": [str(score) for score in scores],
            "release_steps": [None if np.isnan(step) else int(step) for step in steps],
            "duration": 10.0,
        }


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base/ with a tokenizer of a token per character, data/ whose scorer reads the score, and planted traces."""
    folder = tmp_path_factory.mktemp("study")
    make_tiny(folder, {})
    (folder / "data").mkdir()
    (folder / "data" / "tasks.py").write_text(SCORE_IS_TEXT)
    plant(folder, SQL)
    plant(folder, CHAT, seed=1, noise=1.0)
    return folder


def run(study: Path, servers: Replaying, how: Serving) -> pd.DataFrame:
    """The stage on both cells; its table, which is then gone."""
    layout = Layout(study)
    serve(study / "data", layout, study / "base", [SQL, CHAT], how, lambda _: None, servers.make)
    table = pd.read_csv(layout.csv("e2e"))
    layout.csv("e2e").unlink()
    return table


def value(rows: pd.DataFrame, arm: str, task: str, column: str) -> float:
    """One number of a table that is indexed by arm and task."""
    return float(rows[column].to_dict()[arm, task])


def test_a_server_that_does_as_replay_says(study: Path) -> None:
    """Every arm agrees in full, the tuned policy saves rows within its drop, and rates stand in the rows of all."""
    servers = Replaying(Layout(study))
    table = run(study, servers, Serving(max_drop=0.05, concurrency=32))
    assert servers.up == []
    assert list(zip(table["task"], table["arm"], strict=True)) == [
        (task, arm) for arm in ("policy", "never", "stock") for task in (*table["task"].unique()[:2], "all")
    ]
    assert (table[["same_release", "same_score"]] == 1).all(axis=None)
    rows = table.set_index(["arm", "task"])
    assert value(rows, "policy", "all", "requests") == 600
    assert 0 < value(rows, "policy", "sql", "active_row_share") < 0.9
    assert value(rows, "policy", "sql", "drop") < 0.05
    assert value(rows, "stock", "chat", "active_row_share") == 1
    assert value(rows, "never", "all", "requests_per_s") == 60
    assert np.isnan(value(rows, "never", "sql", "requests_per_s"))
    assert rows["ttft_ms_p99"].unique() == pytest.approx([500])
    assert rows["tpot_ms_p50"].to_numpy() == pytest.approx(10)


def test_what_is_sent(study: Path) -> None:
    """A warm-up for each server, then the same mixed requests to every arm; only never says something of releases."""
    servers = Replaying(Layout(study))
    run(study, servers, Serving(max_drop=0.05, concurrency=8, limit=20))
    assert [(name, len(sent)) for name, sent, _ in servers.runs] == [
        *(("lorazor", n) for n in (8, 40, 40)),
        *(("stock", n) for n in (8, 40)),
    ]
    assert all(load["concurrency"] == 8 for _, _, load in servers.runs)
    policy, never, stock = (servers.runs[k][1] for k in (1, 2, 4))
    for key in ("model", "prompt", "max_tokens", "ignore_eos", "temperature"):
        assert [b[key] for b in policy] == [b[key] for b in never] == [b[key] for b in stock]
    assert all(body["vllm_xargs"] == {"lorazor_release": "never"} for body in never)
    assert all("vllm_xargs" not in body for body in (*policy, *stock))
    assert len({body["model"] for body in policy[:10]}) == 2
    assert len({body["cache_salt"] for _, sent, _ in servers.runs[:3] for body in sent}) == 3


def test_differences_are_counted(study: Path) -> None:
    """Six answers of 40 with another step and score."""
    table = run(study, Replaying(Layout(study), wrong=6), Serving(max_drop=0.05, limit=20))
    rows = table.set_index(["arm", "task"])
    for name, expected in {"same_score": 34 / 40, "same_release": 34 / 40, "mean_abs_difference": 6 / 40}.items():
        assert value(rows, "policy", "all", name) == pytest.approx(expected)
    assert value(rows, "never", "all", "same_score") == 1


def test_a_done_kind_is_skipped_and_reported(study: Path) -> None:
    """Nothing is served again; the report has the table."""
    layout, servers = Layout(study), Replaying(Layout(study))
    arguments = (study / "data", layout, study / "base", [SQL, CHAT], Serving(0.05, limit=4), lambda _: None)
    serve(*arguments, servers.make)
    runs = len(servers.runs)
    serve(*arguments, servers.make)
    assert len(servers.runs) == runs
    assert main(["report", "--out", str(study)]) == 0
    assert "| base | all | ordinary | policy | 8 |" in (study / "report" / "study.md").read_text()
    layout.csv("e2e").unlink()


def test_an_unanswered_request_is_named(study: Path) -> None:
    """Nothing is written, and the server is stopped by its block."""

    class Failing(Replaying):
        def answer(self, *args: Any) -> dict[str, Any]:
            found = super().answer(*args)
            return {**found, "errors": ["", "Traceback\nno room", *found["errors"][2:]]}

    with pytest.raises(InputError, match=r"request \w+/\S+ of the run 'warm-up' was not answered: no room"):
        run(study, Failing(Layout(study)), Serving(max_drop=0.05, limit=4))
    assert not Layout(study).csv("e2e").exists()


def test_numbers_of_an_arm() -> None:
    """Share of steps up to the release step, NaN being the whole never-released length; release steps compared."""
    never = frame(tokens=[11, 21, 5], score=[1, 1, 0], release=[None] * 3)
    live = frame(tokens=[11, 30, 5], score=[1, 0, 0], release=[3, 1, None])
    found = numbers(live, never)
    assert found["active_row_share"] == pytest.approx((2 + 0 + 4) / (10 + 20 + 4))
    assert found["length_ratio"] == pytest.approx(46 / 37)
    assert (found["drop"], found["mean_score"]) == (0.5, pytest.approx(1 / 3))
    assert np.isnan(numbers(frame([1], [0], [None]), frame([1], [0], [None]))["tpot_ms_p50"])
    replay = frame(tokens=[5, 21, 11], score=[0, 1, 1], release=[None, 18, 3], names="cba"[:3])
    replay = replay.loc[["a", "c", "b"]]
    compared = against_replay(live, replay)
    assert compared["same_release"] == pytest.approx(2 / 3)
    assert compared["same_score"] == pytest.approx(2 / 3)
    assert compared["mean_difference"] == pytest.approx(-1 / 3)


def frame(tokens: list[int], score: list[float], release: list[int | None], names: str = "abc") -> pd.DataFrame:
    """Answers to requests of one letter each."""
    found = {
        "output_lens": tokens,
        "itls": [[0.1] * (n - 1) for n in tokens],
        "ttfts": [1.0] * len(tokens),
        "release_steps": release,
    }
    return live_frame(list(names[: len(tokens)]), found, score)


def test_noise_is_weighted_by_requests() -> None:
    """Three requests of a noisy task and one of a still one; unknown where one was not measured."""
    noise = {"a": Noise(n=10, differing=4, mean_abs_diff=0.2), "b": Noise(n=10, differing=0, mean_abs_diff=0)}
    found = noise_of(noise, ["a", "a", "b", "a"])
    assert found == {"noise_mean_abs_difference": pytest.approx(0.15), "noise_differing": pytest.approx(0.3)}
    assert noise_of(noise, ["a", "c"]) == {}


def test_tasks_of_another_probe_interval_have_no_policy_in_common() -> None:
    """Both values are named."""
    with pytest.raises(InputError, match=r"sql and chat have no policy in common.*, 8\).*, 16\)"):
        joined([planted_meta(["sql"], 8), planted_meta(["chat"], 16)])


def test_a_server_that_does_not_start(
    study: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and one sentence that ends with the log's last line."""
    command = [sys.executable, "-c", "print('loading'); print('no such model'); raise SystemExit(3)"]
    options = "lorazor.runtime.bench_options"
    monkeypatch.setattr(f"{options}.import_vllm", lambda: None)
    monkeypatch.setattr(f"{options}.engine_of", lambda *_: None)
    monkeypatch.setattr(f"{options}.launch", lambda *_: (command, dict(os.environ)))
    common = ["--data", str(study / "data"), "--base", str(study / "base"), "--out", str(study)]
    assert main(["serve", *common, "--max-drop", "0.05", "--limit", "2"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "the lorazor server stopped with exit code 3" in last
    assert last.endswith("which ends with: no such model")
    assert not Layout(study).csv("e2e").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--max-drop", "2"], "--max-drop must be above 0"),
        (["--serve-args", "'"], "--serve-args"),
        (["--adapter", "release-aware"], "release-aware"),
    ],
)
def test_bad_options(
    options: list[str], words: str, study: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Told before any training or serving."""
    monkeypatch.setattr("lorazor.runtime.bench_options.import_vllm", lambda: None)
    common = ["--data", str(study / "data"), "--base", str(study / "base"), "--out", str(study)]
    assert main(["serve", *common, *options]) == 2
    assert words in capsys.readouterr().err


def stage(folder: Path, name: str, *options: str) -> subprocess.CompletedProcess[str]:
    """One stage in a process of its own, as a user runs it: without what the other tests set for vLLM."""
    command = [sys.executable, "-P", "-m", "lorazor.training.study", name, "--out", str(folder / "out"), *options]
    kept = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_")}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=kept)


@pytest.mark.vllm
@pytest.mark.slow
def test_real_servers_do_as_replay_says(tmp_path: Path) -> None:
    """On the CPU in float32 a server releases each request where replay does, to the same score."""
    tiny = make_tiny(tmp_path, {"sql": 8, "chat": 16})
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "tasks.py").write_text(SCORE_OF_BEGINNING)
    for cell in (SQL, CHAT):
        target = Layout(tmp_path / "out").adapter(cell)
        target.parent.mkdir(parents=True)
        Path(tiny.adapters[cell.task]).rename(target)
    sizes = ["--policy-train", "60", "--calibrate", "60", "--calibrate-least", "60", "--test", "16"]
    data, base = ["--data", str(tmp_path / "data")], ["--base", tiny.base]
    engine = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 32, "kv_cache_memory_bytes": 64 << 20}
    options = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in engine.items())
    kind, collecting = ["--adapter", "ordinary"], json.dumps({**engine, "enforce_eager": True})
    for run in (
        stage(tmp_path, "split", *data, *sizes, "--validation", "4", "--adapter-share", "0.1"),
        stage(tmp_path, "collect", *data, *base, *kind, "--probe-interval", "4", "--engine", collecting),
        stage(tmp_path, "serve", *data, *base, "--max-drop", "0.3", "--serve-args", f"--enforce-eager {options}"),
    ):
        assert run.returncode == 0, run.stderr[-3000:]
    rows = pd.read_csv(tmp_path / "out" / "e2e.csv").set_index(["arm", "task"])
    assert (rows[["same_release", "same_score"]] == 1).all(axis=None), rows
    assert value(rows, "policy", "all", "active_row_share") < 0.9
    assert all(value(rows, "stock", "all", name) > 0 for name in ("requests_per_s", "ttft_ms_p50", "tpot_ms_p99"))
