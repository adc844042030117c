"""`tune` on planted traces with a real LightGBM artifact: what it finds, what it writes, and what it refuses."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lorazor.features.errors import InputError
from lorazor.policy.artifact import load_artifact
from lorazor.policy.manifest import POLICY_FILE, Manifest
from lorazor.training.calibration import Calibration, calibration
from lorazor.training.losses import observed
from lorazor.training.replay import active_row_share, summarize
from lorazor.training.traces import Meta, Noise, TraceSet, write_traces
from lorazor.training.tune import threshold_for_share, tune
from tests.planted import fingerprint_of, joined, planted_traces
from tests.planted_policy import planted_artifact

Change = dict[str, Any]


def two_tasks(n: int, seed: int) -> TraceSet:
    """A hidden task "sql" and an unsafe task "chat"."""
    return joined(planted_traces(n, seed), planted_traces(n, seed, task="chat", kind="unsafe"))


def stored(folder: Path, traces: TraceSet, **meta: Any) -> Path:
    """Write `traces` with changes to their meta, and give the folder back."""
    write_traces(folder, traces.steps, traces.rollouts, traces.meta.model_copy(update=meta))
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy trained on two planted tasks, their training traces and fresh calibration traces."""
    folder = tmp_path_factory.mktemp("tune")
    training = two_tasks(800, seed=1)
    stored(folder / "training", training)
    stored(folder / "fresh", two_tasks(600, seed=2))
    planted_artifact(folder / "policy", training)
    return folder


@pytest.fixture
def policy(home: Path, tmp_path: Path) -> Path:
    """A copy of the policy that a test may change."""
    return Path(shutil.copytree(home / "policy", tmp_path / "policy"))


def manifest(folder: Path) -> Manifest:
    """The policy.json of `folder`."""
    return Manifest.model_validate_json((folder / POLICY_FILE).read_bytes())


def changed(policy: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Edit policy.json by hand."""
    content = json.loads((policy / POLICY_FILE).read_text())
    change(content)
    (policy / POLICY_FILE).write_text(json.dumps(content))


def test_finds_the_safe_task_and_leaves_the_unsafe_one(home: Path, policy: Path) -> None:
    """The hidden task gets a threshold that keeps its promise on 3,000 other requests; the unsafe one gets never."""
    report = tune(policy, home / "fresh", max_drop=0.05, confidence=0.9)
    assert report.tasks["chat"].threshold is None
    assert report.tasks["chat"].bound == 0
    assert report.tasks["chat"].overall.active_row_share == 1
    kept = report.tasks["sql"].threshold
    assert kept is not None
    assert report.tasks["sql"].overall.active_row_share < 0.75
    data = fresh_truth(policy, policy.parent)
    sql = data.tasks["sql"]
    outcome = sql.table.outcome(sql.table.first_decision(sql.scores, kept))
    loss = observed("relative", sql.table.score, outcome.score)
    assert loss is not None
    assert loss < 0.05


def fresh_truth(policy: Path, folder: Path) -> Calibration:
    """3,000 requests that nothing has seen."""
    return calibration(policy, stored(folder / "truth", planted_traces(3000, seed=3)))


def test_writes_thresholds_and_guarantees(home: Path, policy: Path) -> None:
    """policy.json holds threshold and guarantee, the rest of it and the other files are as before, and it loads."""
    before = manifest(policy)
    report = tune(policy, home / "fresh", max_drop=0.05, confidence=0.8)
    after = load_artifact(policy).manifest
    sql = after.tasks["sql"]
    assert sql.threshold == report.tasks["sql"].threshold
    assert sql.threshold in before.threshold_grid["sql"]
    g = sql.guarantee
    assert g is not None
    assert (g.kind, g.max_drop, g.confidence, g.n) == ("relative", 0.05, 0.8, 600)
    assert g.p_value is not None
    assert g.p_value <= 0.2
    assert g.loss is not None
    assert g.bound is not None
    assert g.loss < g.bound <= 0.06
    assert after.tasks["chat"].guarantee is None
    assert after.model_copy(update={"tasks": before.tasks}) == before
    assert sorted(p.name for p in policy.iterdir()) == sorted(p.name for p in (home / "policy").iterdir())


def test_json_is_as_designed(home: Path, policy: Path, tmp_path: Path) -> None:
    """--json holds exactly the keys of the design, never as null, and what the report says."""
    report = tune(policy, home / "fresh", max_drop=0.05, json_path=tmp_path / "out.json")
    content = json.loads((tmp_path / "out.json").read_text())
    keys = "threshold max_drop confidence bound n q_base q_adapter q_policy drop active_row_share length_ratio"
    assert content == report.to_dict()
    assert set(content) == {"tasks"}
    for task in content["tasks"].values():
        assert set(task) == set(keys.split())
    assert content["tasks"]["chat"]["threshold"] is None
    assert content["tasks"]["sql"]["max_drop"] == 0.05


@pytest.mark.parametrize("kind", ["relative", "net", "absolute", "signed"])
def test_each_kind_can_be_asked_for(home: Path, policy: Path, kind: Any) -> None:
    """Every kind tunes greedy traces, is recorded, and is named in the text."""
    report = tune(policy, home / "fresh", max_drop=0.1, kind=kind, task="sql")
    assert report.tasks["sql"].kind == kind
    guarantee = manifest(policy).tasks["sql"].guarantee
    assert guarantee is not None
    assert guarantee.kind == kind
    assert f"{kind} loss here" in report.render()


def test_sampled_traces_take_the_signed_loss(home: Path, policy: Path, tmp_path: Path) -> None:
    """Traces that are not greedy are tuned by the signed loss, with a note; another kind is refused."""
    sampled = stored(tmp_path / "sampled", planted_traces(1500, seed=5, greedy=False))
    report = tune(policy, sampled, max_drop=0.1)
    assert report.tasks["sql"].kind == "signed"
    assert report.tasks["sql"].threshold is not None
    assert "signed losses are in points" in report.render()
    with pytest.raises(InputError, match="must be signed, not relative"):
        tune(policy, sampled, max_drop=0.1, kind="relative")


def test_nothing_passes_says_what_it_takes(home: Path, policy: Path, tmp_path: Path) -> None:
    """Too few requests: never, with the number needed and the smallest max-drop that these could certify."""
    few = stored(tmp_path / "few", planted_traces(60, seed=6))
    report = tune(policy, few, max_drop=0.02, task="sql")
    sql = report.tasks["sql"]
    assert sql.threshold is None
    assert sql.tested is not None
    assert sql.tested.needed is not None
    assert sql.tested.needed > 60
    solved = int((planted_traces(60, seed=6).rollouts.query("mode == 'adapter'")["score"] > 0).sum())
    assert sql.tested.certifiable is not None
    assert 1 <= sql.tested.certifiable / (1 - 0.1 ** (1 / solved)) < 1.2
    assert f"about {sql.tested.needed:,} such requests are needed" in report.render()
    assert "could certify, none of them harmed" in report.render()


def test_a_threshold_that_saves_nothing_becomes_never(home: Path, policy: Path) -> None:
    """A threshold that passes only because it hardly ever releases is not kept, and the text says why."""
    changed(policy, lambda content: content.update(threshold_grid={"chat": [1.0]}))
    report = tune(policy, home / "fresh", max_drop=0.05, task="chat")
    assert report.tasks["chat"].threshold is None
    assert manifest(policy).tasks["chat"].guarantee is None
    assert "no request that they release keeps a score above 0" in report.render()


def test_never_safe_says_that_no_number_would_do(home: Path, policy: Path) -> None:
    """Where the strictest threshold already loses more than max-drop, more requests are not asked for."""

    def only_low(content: dict[str, Any]) -> None:
        content["threshold_grid"]["chat"] = [min(content["threshold_grid"]["chat"])]

    changed(policy, only_low)
    report = tune(policy, home / "fresh", max_drop=0.05, task="chat")
    assert report.tasks["chat"].tested is not None
    assert report.tasks["chat"].tested.needed is None
    assert "no number of such requests would do" in report.render()


def test_an_empty_grid_means_never(home: Path, policy: Path) -> None:
    """An artifact without a threshold grid is tuned to never rather than to a threshold chosen on these data."""
    changed(policy, lambda content: content.update(threshold_grid={}))
    report = tune(policy, home / "fresh", max_drop=0.05, task="sql")
    assert report.tasks["sql"].threshold is None


def test_by_hand(home: Path, policy: Path) -> None:
    """A threshold set by hand is written without a guarantee; its loss and bound are shown; other tasks stay."""
    tune(policy, home / "fresh", max_drop=0.05)
    before = manifest(policy).tasks
    report = tune(policy, home / "fresh", task="chat", threshold=0.93)
    after = manifest(policy).tasks
    assert after["chat"].threshold == 0.93
    assert after["chat"].guarantee is None
    assert after["sql"] == before["sql"]
    assert "max_drop" not in report.to_dict()["tasks"]["chat"]
    assert "no guarantee" in report.render()


def test_by_outcome(home: Path, policy: Path) -> None:
    """The threshold for a target share gives a share at or below it, and the next higher score gives one above it."""
    data = calibration(policy, home / "fresh").tasks["sql"]

    def share(threshold: float) -> float:
        return active_row_share(data.table, data.table.outcome(data.table.first_decision(data.scores, threshold)))

    levels = np.unique(data.scores)
    for target in (0.05, 0.3, 0.6):
        report = tune(policy, home / "fresh", task="sql", target_share=target)
        chosen = report.tasks["sql"].threshold
        assert chosen is not None
        assert report.tasks["sql"].overall.active_row_share == share(chosen) <= target
        assert share(levels[levels > chosen].min()) > target
        assert manifest(policy).tasks["sql"].guarantee is None
    with pytest.raises(InputError, match="the least that is possible"):
        threshold_for_share(data, -0.1)


def test_unseen_only_leaves_out_what_training_saw(home: Path, policy: Path, tmp_path: Path) -> None:
    """Traces that hold training and fresh requests are tuned on the fresh ones alone when asked."""
    mixed = stored(tmp_path / "mixed", joined(planted_traces(800, seed=1), planted_traces(500, seed=9)))
    report = tune(policy, mixed, max_drop=0.05, unseen_only=True)
    assert report.tasks["sql"].overall.n == 500
    assert report.tasks["sql"].threshold is not None
    with pytest.raises(InputError, match=r"training saw all 800 .* train with --leave-out"):
        tune(policy, home / "training", max_drop=0.05, unseen_only=True)


def test_tuning_again_gives_the_same(home: Path, policy: Path) -> None:
    """The same data give the same policy.json, byte for byte: no luck can be tried twice."""
    tune(policy, home / "fresh", max_drop=0.05)
    first = (policy / POLICY_FILE).read_bytes()
    tune(policy, home / "fresh", max_drop=0.05)
    assert (policy / POLICY_FILE).read_bytes() == first


def test_the_adapter_s_failures_are_no_saving(home: Path, policy: Path) -> None:
    """The numbers over requests with S > 0 are those of these requests alone."""
    report = tune(policy, home / "fresh", max_drop=0.05, task="sql")
    sql = report.tasks["sql"]
    data = calibration(policy, home / "fresh").tasks["sql"]
    outcome = data.table.outcome(data.table.first_decision(data.scores, sql.threshold))
    assert sql.solved == summarize(data.table, outcome, solved_only=True)
    assert sql.solved is not None
    assert sql.solved.n == int(data.table.solved.sum()) < sql.overall.n


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_drop": 0.0}, "--max-drop must be above 0 and below 1, got 0"),
        ({"max_drop": 1.0}, "--max-drop must be above 0 and below 1, got 1"),
        ({"max_drop": -0.1}, "got -0.1"),
        ({"max_drop": float("nan")}, "got nan"),
        ({"max_drop": 0.05, "confidence": 1.0}, "--confidence must be above 0 and below 1, got 1"),
        ({"max_drop": 0.05, "confidence": 0.0}, "--confidence must be above 0 and below 1, got 0"),
        ({}, "give one of --max-drop, --threshold, --target-share, got none"),
        ({"max_drop": 0.05, "threshold": 0.5, "task": "sql"}, "got --max-drop and --threshold"),
        ({"threshold": 0.5}, "--threshold is for one task: name it with --task"),
        ({"threshold": 1.5, "task": "sql"}, "--threshold must be in [0, 1], got 1.5"),
        ({"target_share": -0.2, "task": "sql"}, "--target-share must be in [0, 1], got -0.2"),
        ({"max_drop": 0.05, "task": "poems"}, "task 'poems' is not one of the policy's: chat, sql"),
    ],
)
def test_refuses_bad_arguments(home: Path, policy: Path, arguments: Change, message: str) -> None:
    """Each bad argument is told by name, rule and value, and nothing is written."""
    before = (policy / POLICY_FILE).read_bytes()
    with pytest.raises(InputError) as caught:
        tune(policy, home / "fresh", **arguments)
    assert message in str(caught.value)
    assert (policy / POLICY_FILE).read_bytes() == before


def test_refuses_requests_that_training_saw(home: Path, policy: Path) -> None:
    """Overlap is refused with the count and one request id."""
    with pytest.raises(InputError, match=r"training saw 800 of the 800 calibration requests \(one is 'sql-1-0'\)"):
        tune(policy, home / "training", max_drop=0.05)


def test_refuses_one_seen_request_among_many(home: Path, policy: Path) -> None:
    """A single request that training saw is enough."""
    digest = hashlib.sha256(b"sql-2-17").hexdigest()[:16]
    changed(policy, lambda content: content["trained_on"].append(digest))
    with pytest.raises(InputError, match=r"training saw 1 of the 600 calibration requests \(one is 'sql-2-17'\)"):
        tune(policy, home / "fresh", max_drop=0.05, task="sql")


def test_refuses_a_max_drop_below_the_noise(home: Path, policy: Path, tmp_path: Path) -> None:
    """A max-drop below the loss of never against itself is refused with both numbers; one above it is not."""
    noise = {"sql": Noise(n=32, differing=3, mean_abs_diff=0.06)}
    noisy = stored(tmp_path / "noisy", planted_traces(600, seed=2), noise=noise)
    with pytest.raises(InputError, match=r"--max-drop 0\.03 is below the noise floor 0\.05"):
        tune(policy, noisy, max_drop=0.03)
    with pytest.raises(InputError, match=r"--max-drop 0\.02 is below the noise floor 0\.03, the absolute loss"):
        tune(policy, noisy, max_drop=0.02, kind="absolute")
    assert "3 of 32 outputs differ" in tune(policy, noisy, max_drop=0.1).render()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("base", {"name": "other", "fingerprint": fingerprint_of("other")}, "field base_fingerprint"),
        ("adapters", [{"name": "sql-lora", "fingerprint": "f" * 64, "task": "sql"}], "unknown to the policy"),
    ],
)
def test_refuses_other_weights(home: Path, policy: Path, tmp_path: Path, field: str, value: Any, message: str) -> None:
    """Traces of another base, or of an adapter that the policy does not know, are refused by name."""
    traces = planted_traces(50, seed=2)
    meta = Meta.model_validate({**traces.meta.model_dump(), field: value})
    write_traces(tmp_path / "other", traces.steps, traces.rollouts, meta)
    with pytest.raises(InputError, match=message):
        tune(policy, tmp_path / "other", max_drop=0.05)


def test_refuses_another_probe_interval(home: Path, policy: Path, tmp_path: Path) -> None:
    """Traces of another g are refused with both values."""
    other = stored(tmp_path / "other", planted_traces(50, seed=2, probe_interval=4))
    with pytest.raises(InputError, match=r"field probe_interval is 8, .* 4"):
        tune(policy, other, max_drop=0.05)


def test_refuses_another_schema(home: Path, policy: Path) -> None:
    """An artifact of another feature schema is refused by field."""
    changed(policy, lambda content: content.update(schema_hash="0" * 64))
    with pytest.raises(InputError, match="field schema_hash"):
        tune(policy, home / "fresh", max_drop=0.05)


def test_refuses_empty_and_missing_data(home: Path, policy: Path, tmp_path: Path) -> None:
    """No rows, no folder, no artifact, no task in common, a registry name: one sentence each."""
    traces = planted_traces(20, seed=2)
    empty = tmp_path / "empty"
    write_traces(empty, traces.steps.iloc[:0], traces.rollouts.iloc[:0], traces.meta)
    poems = stored(tmp_path / "poems", planted_traces(20, seed=2, task="poems"))
    for where, data, message in (
        (policy, empty, "there are no step rows"),
        (policy, tmp_path / "nowhere", "not a trace folder"),
        (tmp_path / "nothing", home / "fresh", "no such policy artifact"),
        (policy, poems, "no task in common: the policy knows chat, sql, the traces hold poems"),
        ("models:/policy@best", home / "fresh", "give a folder, not a registry name"),
    ):
        with pytest.raises(InputError, match=message):
            tune(where, data, max_drop=0.05)


def test_tasks_that_only_the_traces_have_are_noted(home: Path, policy: Path, tmp_path: Path) -> None:
    """A task that the policy does not know is skipped with a note, and one without requests is left as it was."""
    extra = joined(planted_traces(400, seed=2), planted_traces(20, seed=2, task="poems"))
    report = tune(policy, stored(tmp_path / "extra", extra), max_drop=0.05)
    assert set(report.tasks) == {"sql"}
    assert "task 'poems' of the traces is unknown" in report.render()
    assert "left as it was, for lack of requests or by --task: chat" in report.render()


def test_an_unwritable_json_path_is_told(home: Path, policy: Path, tmp_path: Path) -> None:
    """--json at a place that cannot be written is bad input, not a traceback."""
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        tune(policy, home / "fresh", max_drop=0.05, task="sql", json_path=tmp_path / "file" / "out.json")
