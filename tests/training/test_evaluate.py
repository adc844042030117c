"""`evaluate` on planted traces: its numbers against a plain loop over the tables, its flags and its files."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lorazor.features.errors import InputError
from lorazor.policy.artifact import Artifact, load_artifact, update_tasks
from lorazor.policy.manifest import POLICY_FILE, Guarantee, TaskPolicy
from lorazor.training.evaluate import evaluate
from lorazor.training.replay import ReplayTable
from lorazor.training.traces import Meta, TraceSet, write_traces
from tests.planted import fingerprint_of, joined, planted_traces
from tests.planted_policy import planted_artifact


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy of two tasks with a threshold for "sql", its training traces and fresh traces with graded scores."""
    folder = tmp_path_factory.mktemp("evaluate")
    training = joined(planted_traces(600, seed=1), planted_traces(200, seed=1, task="chat", kind="unsafe"))
    fresh = joined(planted_traces(150, seed=2, graded=True), planted_traces(80, seed=2, task="chat", kind="unsafe"))
    for name, traces in (("training", training), ("fresh", fresh)):
        write_traces(folder / name, traces.steps, traces.rollouts, traces.meta)
    artifact = planted_artifact(folder / "policy", training)
    promise = Guarantee(kind="relative", max_drop=0.05, confidence=0.9, n=400, bound=0.04)
    mean = artifact.manifest.tasks["sql"].mean_output_tokens
    update_tasks(folder / "policy", {"sql": TaskPolicy(threshold=0.5, mean_output_tokens=mean, guarantee=promise)})
    return folder


def literal(artifact: Artifact, traces: TraceSet, task: str, solved_only: bool) -> dict[str, Any]:
    """The numbers of design.md, request by request and row by row."""
    policy, rollouts = artifact.manifest.tasks[task], traces.rollouts
    table = ReplayTable.from_traces(traces, task, policy.mean_output_tokens)
    scores = artifact.scorer.score(table.features)
    active = steps = tokens = length_sum = 0
    s_sum = r_sum = base_sum = 0.0
    n = 0
    for request_id, length in traces.select(task).requests.set_index("request_id")["length"].items():
        rows = rollouts[rollouts["request_id"] == request_id]
        score = {m: float(rows[rows["mode"] == m]["score"].iloc[0]) for m in ("adapter", "base")}
        if solved_only and score["adapter"] == 0:
            continue
        mine = np.flatnonzero(table.request_id[table.request] == request_id)
        reached = [j for j in mine if policy.threshold is not None and scores[j] >= policy.threshold]
        release, result, output = int(length), score["adapter"], int(length)
        if reached:
            c = min(int(table.step[j]) for j in reached)
            release = 1 if c == 0 else c + 2
            row = rows[(rows["mode"] == "released") & (rows["release_step"] == release)].iloc[0]
            result, output = float(row["score"]), int(row["output_tokens"])
        n += 1
        active, steps = active + release - 1, steps + int(length) - 1
        tokens, length_sum = tokens + output, length_sum + int(length)
        s_sum, r_sum, base_sum = s_sum + score["adapter"], r_sum + result, base_sum + score["base"]
    return {
        "n": n,
        "q_base": base_sum / n,
        "q_adapter": s_sum / n,
        "q_policy": r_sum / n,
        "drop": 1 - r_sum / s_sum,
        "active_row_share": active / steps,
        "length_ratio": tokens / length_sum,
        "retention": (r_sum - base_sum) / (s_sum - base_sum),
    }


def test_numbers_equal_a_literal_replay(home: Path) -> None:
    """Every number, over all requests and over those with S > 0, is that of a loop over the raw tables."""
    report = evaluate(home / "policy", home / "fresh")
    fresh = joined(planted_traces(150, seed=2, graded=True), planted_traces(80, seed=2, task="chat", kind="unsafe"))
    artifact = load_artifact(home / "policy")
    for task in ("sql", "chat"):
        for summary, solved_only in ((report.tasks[task].overall, False), (report.tasks[task].solved, True)):
            assert summary is not None
            for key, wanted in literal(artifact, fresh, task, solved_only).items():
                assert math.isclose(getattr(summary, key), wanted, rel_tol=1e-9, abs_tol=1e-12), (task, key)
    assert 0.2 < report.tasks["sql"].overall.active_row_share < 0.9
    assert report.tasks["chat"].overall.active_row_share == 1


def test_release_steps_count_every_request(home: Path) -> None:
    """The distribution counts each request once, at steps of the grid; a task at never counts all as never."""
    report = evaluate(home / "policy", home / "fresh")
    steps = report.tasks["sql"].release_steps
    assert sum(steps.values()) == 150
    assert set(steps) - {None} <= {1, 3, *range(10, 70, 8)}
    assert len(steps) > 3
    assert report.tasks["chat"].release_steps == {None: 80}
    assert "release step    requests" in report.render()


def test_json_is_as_designed(home: Path, tmp_path: Path) -> None:
    """--json holds the keys of the design; max_drop, confidence and bound only where tune recorded them."""
    report = evaluate(home / "policy", home / "fresh", json_path=tmp_path / "out.json")
    content = json.loads((tmp_path / "out.json").read_text())
    measured = {"threshold", "n", "q_base", "q_adapter", "q_policy", "drop", "active_row_share", "length_ratio"}
    assert content == report.to_dict()
    assert set(content["tasks"]["chat"]) == measured
    assert content["tasks"]["chat"]["threshold"] is None
    assert set(content["tasks"]["sql"]) == measured | {"max_drop", "confidence", "bound"}
    assert [content["tasks"]["sql"][k] for k in ("threshold", "bound")] == [0.5, 0.04]
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


def test_overlap_is_flagged_and_can_be_left_out(home: Path, tmp_path: Path) -> None:
    """Requests that training saw are counted in a warning, not refused; --unseen-only leaves them out."""
    assert "WARNING" not in evaluate(home / "policy", home / "fresh").render()
    mixed = joined(planted_traces(600, seed=1), planted_traces(50, seed=7))
    write_traces(tmp_path / "mixed", mixed.steps, mixed.rollouts, mixed.meta)
    report = evaluate(home / "policy", tmp_path / "mixed")
    assert report.tasks["sql"].seen_in_training == 600
    assert "WARNING: training saw 600 of these 650 requests" in report.render()
    assert evaluate(home / "policy", tmp_path / "mixed", unseen_only=True).tasks["sql"].overall.n == 50


def test_retention_is_null_where_the_adapter_gains_nothing(home: Path, tmp_path: Path) -> None:
    """Where Q_adapter - Q_base is within twice its standard error, retention is null and shown as a dash."""
    traces = planted_traces(50, seed=8)
    never = traces.rollouts[traces.rollouts["mode"] == "adapter"].set_index("request_id")["score"]
    is_base = traces.rollouts["mode"] == "base"
    scores = traces.rollouts["score"].where(~is_base, traces.rollouts["request_id"].map(never)).astype(np.float32)
    write_traces(tmp_path / "t", traces.steps, traces.rollouts.assign(score=scores), traces.meta)
    assert evaluate(home / "policy", tmp_path / "t").tasks["sql"].overall.retention is None


def test_a_drop_without_any_score_is_left_out(home: Path, tmp_path: Path) -> None:
    """Where mean S = 0 the drop is null: not in the JSON, and there is no line for S > 0."""
    traces = planted_traces(50, seed=8, quality=0.0)
    write_traces(tmp_path / "t", traces.steps, traces.rollouts, traces.meta)
    report = evaluate(home / "policy", tmp_path / "t")
    assert "drop" not in report.to_dict()["tasks"]["sql"]
    assert "S > 0" not in report.render()


def test_refuses_what_does_not_fit(home: Path, tmp_path: Path) -> None:
    """Another base, g, schema or adapter, an unknown task and missing traces are refused by name."""
    traces = planted_traces(30, seed=3)
    slow = planted_traces(30, seed=3, probe_interval=4)
    other = {"name": "other", "fingerprint": fingerprint_of("other")}
    metas = {
        "base": Meta.model_validate({**traces.meta.model_dump(), "base": other}),
        "adapter": Meta.model_validate(
            {**traces.meta.model_dump(), "adapters": [{**other, "name": "sql-lora", "task": "sql"}]}
        ),
    }
    for name, meta in metas.items():
        write_traces(tmp_path / name, traces.steps, traces.rollouts, meta)
    write_traces(tmp_path / "slow", slow.steps, slow.rollouts, slow.meta)
    schema = Path(shutil.copytree(home / "policy", tmp_path / "schema"))
    content = json.loads((schema / POLICY_FILE).read_text())
    (schema / POLICY_FILE).write_text(json.dumps({**content, "schema_hash": "0" * 64}))
    for policy, data, task, message in (
        (home / "policy", tmp_path / "base", None, "field base_fingerprint"),
        (home / "policy", tmp_path / "adapter", None, "adapter 'sql-lora' .* is unknown to the policy"),
        (home / "policy", tmp_path / "slow", None, "field probe_interval"),
        (schema, home / "fresh", None, "field schema_hash"),
        (home / "policy", home / "fresh", "poems", "task 'poems' is not one of the policy's"),
        (home / "policy", tmp_path / "nowhere", None, "not a trace folder"),
    ):
        with pytest.raises(InputError, match=message):
            evaluate(policy, data, task=task)


def test_evaluate_changes_nothing(home: Path) -> None:
    """The artifact is only read."""
    before = {p.name: p.read_bytes() for p in (home / "policy").iterdir()}
    evaluate(home / "policy", home / "fresh")
    assert {p.name: p.read_bytes() for p in (home / "policy").iterdir()} == before
