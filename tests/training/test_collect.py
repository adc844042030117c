"""What collect does around its engine: rows, checks of the data, shards that survive a kill, and resuming.

The engine here is a deterministic stand-in; test_collect_vllm.py runs the same on vLLM.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from lorazor.features.errors import InputError
from lorazor.features.grid import is_decision_step, release_grid
from lorazor.training.collect import collect
from lorazor.training.collect_data import read_requests
from lorazor.training.collect_noise import sample
from lorazor.training.collect_report import CollectReport
from lorazor.training.collect_store import differences
from lorazor.training.traces import TraceSet, read_traces
from tests.training.fake_engine import FakeEngine, make_collection

CHILD = Path(__file__).with_name("fake_engine.py")


def run(config: Path, out: Path, engine: FakeEngine | None = None, **options: Any) -> CollectReport:
    """Collect with the stand-in."""
    return collect(config, out, engine=lambda _: engine or FakeEngine(), **options)


def assert_same(a: TraceSet, b: TraceSet) -> None:
    """Both tables hold the same rows in the same order."""
    pd.testing.assert_frame_equal(a.steps, b.steps)
    pd.testing.assert_frame_equal(a.rollouts, b.rollouts)


def test_every_request_has_its_trace_and_a_rollout_for_every_step_of_the_grid(tmp_path: Path) -> None:
    """Never, base, and each release step below the never-released length, with the scores of their texts."""
    report = run(make_collection(tmp_path), tmp_path / "out")
    traces = read_traces(tmp_path / "out")
    assert traces.tasks == ["one", "two"]
    for request in traces.requests.itertuples():
        rows = traces.rollouts[traces.rollouts["request_id"] == request.request_id]
        grid = release_grid(int(str(request.length)), 4)
        assert list(rows["mode"]) == ["adapter", "base"] + ["released"] * len(grid)
        assert list(rows["release_step"].dropna()) == grid
        assert rows["same_text"].iloc[0]
        assert not rows["differs"].any()
    due = traces.steps["step"].map(lambda step: is_decision_step(step, 4))
    assert (traces.steps["probed"] == due).all()
    assert (traces.steps["kl"].notna() == due).all()
    assert traces.steps["entropy"].notna().all()
    assert report.tasks["one"].requests == 7
    assert (
        report.tasks["one"].released_runs
        == (traces.rollouts["mode"] == "released")[traces.rollouts["task"] == "one"].sum()
    )
    assert report.shards == 6
    assert "one" in report.render()


def test_texts_are_kept_where_asked(tmp_path: Path) -> None:
    """The never-released text of every request, and each other one that differs; scores and digest are as without."""
    for name, texts in (("plain", False), ("kept", True)):
        (tmp_path / f"{name}-made").mkdir()
        run(make_collection(tmp_path / f"{name}-made", texts=texts), tmp_path / name)
    plain, kept = read_traces(tmp_path / "plain"), read_traces(tmp_path / "kept")
    assert plain.rollouts["text"].isna().all()
    assert plain.digest() == kept.digest()
    never = kept.rollouts["mode"] == "adapter"
    assert (kept.rollouts["text"].notna() == (never | ~kept.rollouts["same_text"])).all()
    for request in kept.requests.itertuples():
        tokens = kept.steps.loc[kept.steps["request_id"] == request.request_id, "token_id"]
        text = kept.rollouts.loc[never & (kept.rollouts["request_id"] == request.request_id), "text"].item()
        assert text == " ".join(map(str, tokens))


def test_meta_says_what_the_traces_were_made_from(tmp_path: Path) -> None:
    """Fingerprints, g, tasks, and the noise floor of both tasks."""
    config = make_collection(tmp_path, noise={"requests": 4, "concurrency": 2})
    run(config, tmp_path / "out")
    meta = read_traces(tmp_path / "out").meta
    assert meta.probe_interval == 4
    assert [(a.name, a.task) for a in meta.adapters] == [("a", "one"), ("b", "two")]
    assert len({meta.base.fingerprint, *(a.fingerprint for a in meta.adapters)}) == 3
    assert meta.greedy
    assert meta.noise["two"].model_dump() == {"n": 4, "differing": 0, "mean_abs_diff": 0}


def test_rollouts_start_as_soon_as_their_trace_is_there(tmp_path: Path) -> None:
    """Released runs of early requests are queued while other requests of the shard still wait for their traces."""
    engine = FakeEngine()
    run(make_collection(tmp_path, shard_size=7, noise={"requests": 0}), tmp_path / "out", engine)
    releases = [r.release for r in engine.submitted if r.key.startswith("shard-00000")]
    assert releases[:14] == ["never"] * 7 + [None] * 7
    assert set(releases[14:]) >= {1, 3, 6}
    assert engine.widest > 14


def test_a_rollout_that_leaves_its_trace_too_early_is_repeated_then_marked(tmp_path: Path) -> None:
    """One drift is repaired by the repeat; two mark the rollout, which is counted as left out."""
    config = make_collection(tmp_path, requests=1)
    once = run(config, tmp_path / "once", FakeEngine(drifting={(ord("o"), 3): 1}))
    twice = run(config, tmp_path / "twice", FakeEngine(drifting={(ord("o"), 3): 2}))
    assert (once.tasks["one"].left_out, twice.tasks["one"].left_out) == (0, 1)
    marked = read_traces(tmp_path / "twice").rollouts.query("differs")
    assert list(marked["release_step"]) == [3]
    assert_same(read_traces(tmp_path / "once"), _unbroken(config, tmp_path))


def test_forked_rollouts_are_given_their_prefix(tmp_path: Path) -> None:
    """A forked run gets the trace's first r - 1 tokens, and the rows are those of whole runs."""
    engine = FakeEngine()
    run(make_collection(tmp_path, rollouts="forked"), tmp_path / "out", engine)
    for forked in engine.submitted:
        assert len(forked.prefix) == (forked.release - 1 if isinstance(forked.release, int) else 0)
    config = make_collection(tmp_path / "whole")
    run(config, tmp_path / "whole" / "out")
    assert_same(read_traces(tmp_path / "out"), read_traces(tmp_path / "whole" / "out"))


def test_texts_that_do_not_read_back_are_not_forked(tmp_path: Path) -> None:
    """Where a tokenizer does not give the trace's text for its tokens, rollouts run whole."""
    engine = FakeEngine()
    engine.unreadable = True
    run(make_collection(tmp_path, rollouts="forked"), tmp_path / "out", engine)
    assert not any(r.prefix for r in engine.submitted)


def _unbroken(config: Path, folder: Path) -> TraceSet:
    run(config, folder / "unbroken")
    return read_traces(folder / "unbroken")


def test_noise_counts_requests_that_come_out_otherwise(tmp_path: Path) -> None:
    """A never-released run that differs in its second life moves the noise floor."""

    class Noisy(FakeEngine):
        def _finish(self, run: Any) -> Any:
            output = super()._finish(run)
            if run.key.startswith("noise.one.0"):
                return type(output)(output.key, "0", (1, 2), "stop", None)
            return output

    config = make_collection(tmp_path)
    run(config, tmp_path / "out", Noisy())
    traces = read_traces(tmp_path / "out")
    first = traces.rollouts.query("mode == 'adapter'").iloc[0]
    noise = traces.meta.noise["one"]
    assert (noise.n, noise.differing) == (7, 1)
    # The text "0" is request 0's reference, so its score went to 1.
    assert noise.mean_abs_diff == pytest.approx((1 - first["score"]) / 7, abs=1e-6)
    assert traces.meta.noise["two"].differing == 0


def test_a_sample_is_spread_evenly() -> None:
    """First and last item are in, no item twice, never more than there are."""
    assert sample(range(10), 4) == [0, 3, 6, 9]
    assert sample(range(2), 4) == [0, 1]
    assert sample(range(5), 0) == []


@pytest.mark.parametrize("seed", range(2))
def test_killed_at_any_moment_and_resumed_it_gives_the_same_rows(tmp_path: Path, seed: int) -> None:
    """SIGKILL again and again, at different moments, then a last resume: the rows are those of an unbroken run."""
    config = make_collection(tmp_path)
    out = tmp_path / "out"
    kills = 0
    for attempt in range(3):
        child = subprocess.Popen(
            [sys.executable, "-P", str(CHILD), str(config), str(out), "resume"],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        deadline = time.monotonic() + 60
        while not (out / "meta.json").exists() and child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05 + 0.12 * (seed * 3 + attempt))
        kills += child.poll() is None
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert kills > 0
    report = run(config, out, resume=True)
    assert_same(read_traces(out), _unbroken(config, tmp_path))
    assert not list(out.rglob("*.tmp"))
    assert report.shards == 6


def test_half_a_shard_is_done_again(tmp_path: Path) -> None:
    """Steps without rollouts, as a kill between the two renames leaves them, do not count and do not stay."""
    config, out = make_collection(tmp_path), tmp_path / "out"
    run(config, out)
    (out / "rollouts" / "shard-00002.parquet").unlink()
    (out / "steps" / "shard-00002.parquet").write_bytes(b"damaged")
    (out / "steps" / ".shard-00003.parquet.x.tmp").write_bytes(b"half")
    report = run(config, out, resume=True)
    assert report.resumed_shards == 5
    assert_same(read_traces(out), _unbroken(config, tmp_path))
    assert not list(out.rglob("*.tmp"))


def test_a_complete_collection_starts_no_engine(tmp_path: Path) -> None:
    """Resuming what is complete only reports."""
    config, out = make_collection(tmp_path), tmp_path / "out"
    run(config, out)

    def never(_: Any) -> FakeEngine:
        raise AssertionError("an engine was started")

    assert collect(config, out, resume=True, engine=never).resumed_shards == 6


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    """Without --resume nothing is overwritten; with it, only a collection is gone on with."""
    config, out = make_collection(tmp_path), tmp_path / "out"
    out.mkdir()
    (out / "precious.txt").write_text("x")
    with pytest.raises(InputError, match="is not empty: give another folder, or --resume"):
        run(config, out)
    with pytest.raises(InputError, match=r"cannot be resumed: it has no collection\.json"):
        run(config, out, resume=True)
    assert [path.name for path in out.iterdir()] == ["precious.txt"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"probe_interval": 8}, "probe_interval was 4, is 8"),
        ({"shard_size": 5}, "shard_size was 3, is 5"),
        ({"engine": {"max_num_seqs": 2}}, "engine.max_num_seqs was absent, is 2"),
    ],
)
def test_resuming_with_another_configuration_names_what_changed(
    tmp_path: Path, change: dict[str, Any], expected: str
) -> None:
    """Each difference is told with both values."""
    config, out = make_collection(tmp_path), tmp_path / "out"
    run(config, out)
    config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    with pytest.raises(InputError) as caught:
        run(config, out, resume=True)
    assert str(caught.value) == f"{out} was started otherwise: {expected}"


def test_resuming_with_other_data_or_weights_is_refused(tmp_path: Path) -> None:
    """A changed row, a changed limit and changed adapter weights are seen."""
    config, out = make_collection(tmp_path), tmp_path / "out"
    run(config, out)
    with pytest.raises(InputError, match=r"tasks\.one\.requests was 7, is 2"):
        run(config, out, resume=True, limit=2)
    rows = (tmp_path / "two.jsonl").read_text()
    (tmp_path / "two.jsonl").write_text(rows.replace('"reference": "3"', '"reference": "4"'))
    with pytest.raises(InputError, match=r"tasks\.two\.data_sha256 was "):
        run(config, out, resume=True)
    (tmp_path / "two.jsonl").write_text(rows)
    (tmp_path / "b" / "adapter_config.json").write_text('{"r": 5}')
    with pytest.raises(InputError, match=r"adapters\.b was "):
        run(config, out, resume=True)


def test_differences_are_told_by_path() -> None:
    """Nested values are compared key by key; a missing one is called absent."""
    assert differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}, "d": 4}) == [
        "a.c was 2, is 3",
        "d was absent, is 4",
    ]


def test_the_limit_takes_the_first_requests(tmp_path: Path) -> None:
    """The smaller one of the call's and the task's limit holds."""
    config = make_collection(tmp_path)
    report = run(config, tmp_path / "out", limit=2)
    assert report.tasks["one"].requests == 2
    assert report.tasks["two"].requests == 2
    with pytest.raises(InputError, match="limit must be 1 or more, got 0"):
        run(config, tmp_path / "none", limit=0)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: a row must be an object, got list"),
        ('{"reference": "x"}', 'line 2: give either "prompt" or "messages"'),
        ('{"prompt": "x", "messages": []}', 'line 2: give either "prompt" or "messages"'),
        ('{"prompt": ""}', 'line 2: "prompt" must be a text that is not empty'),
        ('{"messages": [{"role": "user"}]}', 'line 2: "messages" must be a list of objects'),
        ('{"prompt": "x", "id": 1.5}', 'line 2: "id" must be text or a whole number, got 1.5'),
        ('{"prompt": "a", "reference": "b"}', "line 2: the same id or request as line 1"),
    ],
)
def test_a_bad_row_names_file_and_line(tmp_path: Path, line: str, expected: str) -> None:
    """The first bad row stops the reading with one sentence."""
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "a", "reference": "b"}\n' + line + "\n")
    with pytest.raises(InputError) as caught:
        read_requests(path, "t")
    assert str(caught.value).startswith(f"{path}, {expected}")


def test_a_request_without_an_id_is_named_after_its_content(tmp_path: Path) -> None:
    """The same request has the same id in another file at another line; a given id is kept."""
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    a.write_text('{"prompt": "p", "reference": "r"}\n{"prompt": "q", "id": 7}\n')
    b.write_text('\n{"prompt": "other"}\n{"reference": "r", "prompt": "p"}\n')
    first, named = read_requests(a, "t")
    assert first.id == read_requests(b, "t")[1].id
    assert named.id == "t/7"


def test_bad_data_is_told_before_the_engine_starts(tmp_path: Path) -> None:
    """A row that its scorer cannot use, an empty file and an unknown scorer are found first."""
    config = make_collection(tmp_path)

    def never(_: Any) -> FakeEngine:
        raise AssertionError("an engine was started")

    (tmp_path / "two.jsonl").write_text('{"prompt": "a", "reference": "b"}\n{"prompt": "x"}\n')
    with pytest.raises(
        InputError, match=r'two\.jsonl, line 2: scorer rouge_l, request two/\w+: the row has no "reference"'
    ):
        collect(config, tmp_path / "out", engine=never)
    (tmp_path / "two.jsonl").write_text("\n")
    with pytest.raises(InputError, match="holds no request"):
        collect(config, tmp_path / "out", engine=never)
    assert not (tmp_path / "out").exists()


def test_a_prompt_that_does_not_fit_is_told_before_anything_runs(tmp_path: Path) -> None:
    """The sentence names the row and all three numbers."""
    config = make_collection(tmp_path)
    (tmp_path / "two.jsonl").write_text(json.dumps({"prompt": "x" * 60, "reference": "y"}))
    engine = FakeEngine()
    with pytest.raises(
        InputError, match=r"two\.jsonl, line 1: a prompt of 60 tokens and max_tokens 20 .*max_model_len 64"
    ):
        run(config, tmp_path / "out", engine)
    assert not engine.submitted


def test_an_engine_that_ignores_releases_is_not_believed(tmp_path: Path) -> None:
    """Without the plugin every released text would be the never-released one; collect stops instead."""
    with pytest.raises(InputError, match="was to release at step 1, but the engine says None: is the LoRazor plugin"):
        run(make_collection(tmp_path), tmp_path / "out", FakeEngine(ignores=True))
