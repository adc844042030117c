"""Exact replay against numbers worked out by hand on the tiny traces, and against a plain loop on planted ones."""

from dataclasses import replace

import numpy as np
import pytest

from lorazor.features.errors import InputError
from lorazor.features.grid import decision_steps
from lorazor.training.labels import safe
from lorazor.training.replay import NEVER, LeftOut, ReplayTable, summarize, sweep
from tests.planted import joined, planted_traces
from tests.training.tiny_traces import tiny_traces


@pytest.fixture(scope="module")
def table() -> ReplayTable:
    """The tiny traces as a replay table."""
    return ReplayTable.from_traces(tiny_traces(), "sql", 6.0)


def test_table_holds_the_tiny_traces(table: ReplayTable) -> None:
    """Requests, decisions and rollouts are joined as the docstring of tiny_traces says."""
    assert table.request_id.tolist() == ["a", "b", "c"]
    assert table.score.tolist() == [1.0, 0.5, 0.0]
    assert table.base_score.tolist() == [0.0, 0.5, 0.0]
    assert table.length.tolist() == [8, 5, 4]
    assert table.first.tolist() == [0, 3, 5, 7]
    assert table.step.tolist() == [0, 1, 4, 0, 1, 0, 1]
    assert table.release.tolist() == [1, 3, 6, 1, 3, 1, 3]
    assert table.released_score.tolist() == [0.0, 0.5, 1.0, 0.5, 0.75, 0.5, 0.0]
    assert table.released_tokens.tolist() == [4, 10, 8, 5, 5, 6, 4]
    assert table.left_out == LeftOut()


def test_safe_labels(table: ReplayTable) -> None:
    """R >= S where S > 0; where S = 0 only the same text is safe, whatever its score."""
    assert safe(table).tolist() == [False, False, True, True, True, False, True]


def test_first_decision_takes_the_first_that_reaches_the_threshold(table: ReplayTable) -> None:
    """Equal counts as reached, NaN never does, and without a threshold nobody releases."""
    scores = np.array([0.1, 0.7, 0.9, np.nan, 0.7, 0.2, np.nan])
    assert table.first_decision(scores, 0.7).tolist() == [1, 4, NEVER]
    assert table.first_decision(scores, 0.1).tolist() == [0, 4, 5]
    assert table.first_decision(scores, None).tolist() == [NEVER] * 3


def test_summary_by_hand(table: ReplayTable) -> None:
    """a releases at r = 3, b at r = 3, c never: every number of the summary, over all requests and over S > 0."""
    outcome = table.outcome(np.array([1, 4, NEVER]))
    assert outcome.release.tolist() == [3, 3, 4]
    everything, judged = summarize(table, outcome), summarize(table, outcome, solved_only=True)
    assert everything.active_row_share == pytest.approx((2 + 2 + 3) / (7 + 4 + 3))
    assert judged.active_row_share == pytest.approx((2 + 2) / (7 + 4))
    assert everything.drop == pytest.approx(1 - 1.25 / 1.5)
    assert everything.length_ratio == pytest.approx((10 + 5 + 4) / 17)
    assert judged.length_ratio == pytest.approx(15 / 13)
    assert (everything.n, judged.n) == (3, 2)
    assert everything.q_adapter == pytest.approx(0.5)
    assert everything.q_base == pytest.approx(0.5 / 3)
    assert everything.q_policy == pytest.approx(1.25 / 3)
    assert everything.released == pytest.approx(2 / 3)
    assert everything.retention is None  # gain 1/3 with a standard error of 1/3


def test_never_and_base_only(table: ReplayTable) -> None:
    """Never keeps every row active at no drop; the base alone keeps none and has its own score and length."""
    never = summarize(table, table.outcome(np.full(3, NEVER)))
    assert (never.active_row_share, never.drop, never.length_ratio, never.released) == (1.0, 0.0, 1.0, 0.0)
    base = summarize(table, table.base_only())
    assert base.active_row_share == 0.0
    assert base.q_policy == base.q_base
    assert base.length_ratio == pytest.approx(9 / 17)


def test_retention_needs_a_gain_of_two_standard_errors() -> None:
    """With planted data the gain is clear: never retains 1, the base 0; with S = base it is null."""
    planted = ReplayTable.from_traces(planted_traces(300, seed=1), "sql", 40.0)
    never = planted.outcome(np.full(len(planted), NEVER))
    assert summarize(planted, never).retention == pytest.approx(1.0)
    assert summarize(planted, planted.base_only()).retention == pytest.approx(0.0)
    same = replace(planted, base_score=planted.score)
    assert summarize(same, never).retention is None


def test_drop_is_null_when_the_adapter_never_scores(table: ReplayTable) -> None:
    """Mean S = 0 gives no drop, and judging by S > 0 is refused in a sentence."""
    failed = table.subset(np.array([False, False, True]))
    outcome = failed.outcome(np.array([0]))
    assert summarize(failed, outcome).drop is None
    with pytest.raises(InputError, match="task 'sql' has no request with a score above 0 to replay"):
        summarize(failed, outcome, solved_only=True)


def test_subset_keeps_decisions_with_their_requests(table: ReplayTable) -> None:
    """Without the middle request the others keep their own decisions."""
    part = table.subset(np.array([True, False, True]))
    assert part.first.tolist() == [0, 3, 5]
    assert part.request.tolist() == [0, 0, 0, 1, 1]
    assert part.released_score.tolist() == [0.0, 0.5, 1.0, 0.5, 0.0]
    assert len(part.features) == 5


def test_marked_and_missing_rollouts_are_left_out_and_counted() -> None:
    """A rollout that differs, or was never recorded, cannot be released at; the request's others still can."""
    traces = tiny_traces()
    rollouts = traces.rollouts.copy()
    rollouts.loc[7, "differs"] = True  # a, r = 3
    rollouts = rollouts.drop(index=10)  # b, r = 3
    table = ReplayTable.from_traces(replace(traces, rollouts=rollouts), "sql", 6.0)
    assert table.left_out == LeftOut(differs=1, missing=1)
    assert table.step.tolist() == [0, 4, 0, 0, 1]
    assert table.first.tolist() == [0, 2, 3, 5]
    assert table.released_score.tolist() == [0.0, 1.0, 0.5, 0.5, 0.0]


def test_table_equals_a_plain_loop_over_the_rows() -> None:
    """On planted traces of two tasks every decision has the outcome that a search of the rollout table finds."""
    traces = joined(planted_traces(30, seed=5), planted_traces(30, seed=6, task="chat", graded=True))
    table = ReplayTable.from_traces(traces, "chat", 40.0)
    rows = traces.rollouts[traces.rollouts["task"] == "chat"]
    keys = zip(rows["request_id"], rows["mode"], rows["release_step"].fillna(0), strict=True)
    by_key = {key: rows.iloc[i] for i, key in enumerate(keys)}
    at = 0
    for i, request in enumerate(map(str, table.request_id)):
        assert table.score[i] == by_key[request, "adapter", 0]["score"]
        for c in decision_steps(int(table.length[i]), 8):
            row = by_key[request, "released", 1 if c == 0 else c + 2]
            assert (table.step[at], table.request[at]) == (c, i)
            assert table.released_score[at] == row["score"]
            assert table.released_tokens[at] == row["output_tokens"]
            assert table.same_text[at] == row["same_text"]
            at += 1
    assert at == len(table.step)


def test_sweep_is_the_summary_at_every_threshold() -> None:
    """Each point of a curve is what `summarize` says; the share never falls when the threshold rises."""
    table = ReplayTable.from_traces(planted_traces(200, seed=2), "sql", 40.0)
    scores = np.random.default_rng(0).random(len(table.step))
    thresholds = np.linspace(0, 1.1, 12)
    curve = sweep(table, scores, thresholds, solved_only=True)
    for k, threshold in enumerate(thresholds):
        outcome = table.outcome(table.first_decision(scores, threshold))
        wanted = summarize(table, outcome, solved_only=True)
        assert curve.share[k] == pytest.approx(wanted.active_row_share)
        assert curve.drop[k] == pytest.approx(wanted.drop)
        assert curve.retention[k] == pytest.approx(wanted.retention)
        assert curve.length_ratio[k] == pytest.approx(wanted.length_ratio)
    assert (np.diff(curve.share) >= 0).all()
    assert curve.share[-1] == 1.0
