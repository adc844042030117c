"""`evaluate --pairs`: every released text that differs, once; the key undoes the blinding, and only the key does."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lorazor.policy.artifact import load_artifact, update_tasks
from lorazor.policy.manifest import TaskPolicy
from lorazor.runtime.cli import main
from lorazor.training.pairs import key_path
from lorazor.training.replay import ReplayTable
from lorazor.training.traces import read_traces, write_traces
from tests.planted import planted_traces
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
    """No texts, a file that is there: one sentence, and what was there stays."""
    assert evaluate(home, tmp_path / "p.jsonl", traces="plain") == 2
    assert "kept no texts: collect with `texts: true`" in capsys.readouterr().err
    (tmp_path / "p.jsonl").write_text("judged")
    assert evaluate(home, tmp_path / "p.jsonl") == 2
    assert "is there already" in capsys.readouterr().err
    assert (tmp_path / "p.jsonl").read_text() == "judged"
