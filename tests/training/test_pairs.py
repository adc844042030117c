"""`evaluate --pairs`: every released text that differs, once; the key undoes the blinding, and only the key does."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorazor.policy.artifact import load_artifact, update_tasks
from lorazor.policy.manifest import TaskPolicy
from lorazor.runtime.cli import main
from lorazor.training.pairs import _pair, _public, _secret, _write, key_path
from lorazor.training.replay import ReplayTable
from lorazor.training.traces import read_traces, write_traces
from tests.planted import joined, planted_traces
from tests.planted_policy import planted_artifact
from tests.training.study_folder import renamed, with_texts


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy with a threshold, and fresh traces with and without texts."""
    folder = tmp_path_factory.mktemp("pairs")
    training, fresh = (renamed(planted_traces(n, seed=n)) for n in (400, 150))
    artifact = planted_artifact(folder / "policy", training)
    mean = artifact.manifest.tasks["sql"].mean_output_tokens
    update_tasks(folder / "policy", {"sql": TaskPolicy(threshold=0.0, mean_output_tokens=mean)})
    write_traces(folder / "plain", fresh.steps, fresh.rollouts, fresh.meta)
    write_traces(folder / "traces", fresh.steps, with_texts(fresh), fresh.meta)
    return folder


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def evaluate(home: Path, out: Path, *options: str, traces: str = "traces") -> int:
    """The command."""
    return main(["evaluate", str(home / "policy"), str(home / traces), "--pairs", str(out), *options])


def released(home: Path) -> dict[str, int]:
    """Request -> release step, of those whose text differs: a plain look-up."""
    artifact, traces = load_artifact(home / "policy"), read_traces(home / "traces")
    policy = artifact.manifest.tasks["sql"]
    table = ReplayTable.from_traces(traces, "sql", policy.mean_output_tokens)
    outcome = table.outcome(table.first_decision(artifact.scorer.score(table.features), policy.threshold))
    texts = traces.rollouts[traces.rollouts["mode"] == "released"].set_index(["request_id", "release_step"])[
        "same_text"
    ]
    kept = [(i, int(outcome.release[k])) for k, i in enumerate(table.request_id) if outcome.released[k]]
    return {i: r for i, r in kept if not texts[i, r]}


def test_the_key_undoes_the_blinding(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every differing request is there once, with its never-released text and that of its release step."""
    out = tmp_path / "pairs.jsonl"
    assert evaluate(home, out) == 0
    pairs, key = rows_of(out), rows_of(key_path(out))
    wanted = released(home)
    assert len(pairs) == len(key) == len(wanted) > 20
    assert {row["request_id"] for row in key} == set(wanted)
    for pair, secret in zip(pairs, key, strict=True):
        assert pair["pair"] == secret["pair"]
        texts = {secret[side]: pair[side] for side in "AB"}
        request = secret["request_id"]
        assert texts == {"never": f"{request} adapter", "released": f"{request} released {wanted[request]}"}
        assert pair.keys() == {"pair", "A", "B"}
    assert f"{len(pairs):,} pairs in {out}" in capsys.readouterr().out


def test_the_coin_is_fair_and_follows_from_the_seed(home: Path, tmp_path: Path) -> None:
    """Both orders occur about as often (6 standard errors); another seed throws anew, the same one alike."""
    files = [tmp_path / f"{name}.jsonl" for name in ("a", "again", "other")]
    for file, seed in zip(files, ("0", "0", "1"), strict=True):
        assert evaluate(home, file, "--pairs-seed", seed) == 0
    a, again, other = ([row["A"] for row in rows_of(key_path(file))] for file in files)
    assert a == again != other
    share = np.mean([side == "never" for side in a + other])
    assert abs(share - 0.5) < 6 * 0.5 / np.sqrt(2 * len(a))


def test_what_was_asked_is_shown_where_it_is_given(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts by id; a request that the file has not is told, and nothing is written."""
    ids = [i.removeprefix("sql/") for i in read_traces(home / "traces").requests["request_id"]]
    for name, known in (("all", ids), ("one", ids[:1])):
        lines = [json.dumps({"id": i, "prompt": f"asked {i}"}) + "\n" for i in known]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    assert evaluate(home, tmp_path / "p.jsonl", "--requests", str(tmp_path / "all.jsonl")) == 0
    for pair, secret in zip(rows_of(tmp_path / "p.jsonl"), rows_of(tmp_path / "p.key.jsonl"), strict=True):
        assert pair["prompt"] == f"asked {secret['request_id'].removeprefix('sql/')}"
    assert evaluate(home, tmp_path / "q.jsonl", "--requests", str(tmp_path / "one.jsonl")) == 2
    assert "of the traces is not there" in capsys.readouterr().err
    assert not (tmp_path / "q.jsonl").exists()
    assert not key_path(tmp_path / "q.jsonl").exists()


def test_refusals(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No texts, a file that is there, no place to write: one sentence, and what was there stays."""
    assert evaluate(home, tmp_path / "p.jsonl", traces="plain") == 2
    assert "kept no texts: collect with `texts: true`" in capsys.readouterr().err
    (tmp_path / "p.jsonl").write_text("judged")
    assert evaluate(home, tmp_path / "p.jsonl") == 2
    assert "is there already" in capsys.readouterr().err
    assert (tmp_path / "p.jsonl").read_text() == "judged"
    assert evaluate(home, tmp_path / "p.jsonl" / "q.jsonl") == 2
    assert "cannot be written (" in capsys.readouterr().err
    assert main(["evaluate", str(home / "policy"), str(home / "traces"), "--requests", "r.jsonl"]) == 2
    assert "--requests r.jsonl shows what was asked in --pairs, which is not given" in capsys.readouterr().err


def test_one_text_that_is_missing_is_told(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It would pass for the never-released text."""
    traces = read_traces(home / "traces")
    gone = np.flatnonzero((traces.rollouts["mode"] == "released") & ~traces.rollouts["same_text"])[:1]
    texts = traces.rollouts["text"].where(~traces.rollouts.index.isin(gone), None)
    write_traces(tmp_path / "gap", traces.steps, traces.rollouts.assign(text=texts), traces.meta)
    assert evaluate(home, tmp_path / "p.jsonl", traces=str(tmp_path / "gap")) == 2
    assert "kept no texts of 1 of its" in capsys.readouterr().err


def test_requests_of_one_task_do_not_serve_another(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the ids of two tasks are alike, each would take the other's prompts."""
    tasks = [renamed(planted_traces(20, seed=5, task=task)) for task in ("sql", "chat")]
    both = joined(*tasks)
    write_traces(tmp_path / "both", both.steps, with_texts(both), both.meta)
    planted_artifact(tmp_path / "policy", both)
    out = ["--pairs", str(tmp_path / "p.jsonl"), "--requests", "any.jsonl"]
    assert main(["evaluate", str(tmp_path / "policy"), str(tmp_path / "both"), *out]) == 2
    assert "is the file of one task, but these are evaluated: sql, chat; use --task" in capsys.readouterr().err


def test_a_failed_write_leaves_neither_file(tmp_path: Path) -> None:
    """Not even the key, which would bar the way to another try."""
    with pytest.raises(UnicodeEncodeError):
        _write({tmp_path / "p.key.jsonl": "key", tmp_path / "p.jsonl": "\ud800"})
    assert list(tmp_path.iterdir()) == []


@given(st.integers(0, 2**40), st.text(), st.text(), st.text())
def test_any_pair_inverts(seed: int, request: str, never: str, released: str) -> None:
    """Whatever seed, request and texts are, public row and key give them back."""
    row = _pair(request, never, released, seed)
    public, secret = _public(1, row, {}, None), _secret(row)
    assert {secret[side]: public[side] for side in "AB"} == {"never": never, "released": released}
    assert public.keys() == {"pair", "A", "B"}
