"""The generator of planted data: that its truth is what it says, and that a policy can find it."""

import time

import numpy as np
import pandas as pd
import pytest

from lorazor.features.grid import release_grid
from lorazor.training.labels import safe
from lorazor.training.replay import ReplayTable
from lorazor.training.traces import TraceSet
from tests.planted import LONG_PROMPT, Population, joined, planted_traces


def released(traces: TraceSet) -> pd.DataFrame:
    """The released rollouts with each request's never-released score beside them, by request and release step."""
    rollouts = traces.rollouts
    never = rollouts[rollouts["mode"] == "adapter"].set_index("request_id")["score"]
    rows = rollouts[rollouts["mode"] == "released"].sort_values(["request_id", "release_step"])
    return rows.assign(never=rows["request_id"].map(never))


def test_five_thousand_requests_take_seconds() -> None:
    """5,000 requests of about 40 steps are made and checked in under ten seconds."""
    started = time.monotonic()
    traces = planted_traces(5000, seed=1)
    assert time.monotonic() - started < 10
    assert len(traces.requests) == 5000
    assert 35 < traces.requests["length"].mean() < 45


def test_the_same_seed_gives_the_same_traces() -> None:
    """Seed and task decide everything, and another seed or task gives other requests and ids."""
    one, again = planted_traces(50, seed=3), planted_traces(50, seed=3)
    assert one.digest() == again.digest()
    for other in (planted_traces(50, seed=4), planted_traces(50, seed=3, task="chat")):
        assert not set(one.requests["request_id"]) & set(other.requests["request_id"])


def test_rollouts_cover_the_release_grid() -> None:
    """Every request has a rollout at exactly the release steps of its grid."""
    traces = planted_traces(80, seed=1, probe_interval=5)
    rows = released(traces)
    for request_id, length in traces.requests.set_index("request_id")["length"].items():
        steps = rows[rows["request_id"] == request_id]["release_step"].to_numpy(np.int64)
        assert steps.tolist() == release_grid(int(length), 5)


def test_hidden_requests_stay_safe_once_they_are() -> None:
    """In a hidden task, no release step is unsafe after a safe one, and both kinds occur."""
    rows = released(planted_traces(400, seed=2))
    rows = rows[rows["never"] > 0]
    rows = rows.assign(kept=rows["score"] >= rows["never"])
    assert 0.2 < rows["kept"].mean() < 0.9
    assert (rows.groupby("request_id")["kept"].diff().dropna() >= 0).all()


def test_hidden_safety_is_written_in_the_signals() -> None:
    """Without noise to speak of, a release is safe exactly where KL is low, or from admission on for long prompts."""
    traces = planted_traces(400, seed=5, noise=0.1)
    table = ReplayTable.from_traces(traces, "sql", 40.0)
    probed = traces.steps[traces.steps["probed"]].set_index(["request_id", "step"])["kl"]
    long = traces.requests.set_index("request_id")["prompt_tokens"] >= LONG_PROMPT
    ids = table.request_id[table.request]
    later = table.step > 0
    low = probed.loc[list(zip(ids[later], table.step[later], strict=True))].to_numpy() < np.exp(-2)
    np.testing.assert_array_equal(safe(table)[later], low)
    np.testing.assert_array_equal(safe(table)[~later], long.loc[list(ids[~later])].to_numpy())


def test_unsafe_tasks_are_never_safe() -> None:
    """In an unsafe task every release of a solved request loses its score, though the signals still change."""
    traces = planted_traces(300, seed=2, kind="unsafe")
    assert (released(traces)["score"] == 0).all()
    assert traces.steps["kl"].min() < 0.05
    assert traces.rollouts.query("mode == 'adapter'")["score"].mean() > 0.5


def test_knobs_do_what_they_say() -> None:
    """`quality` is the mean of S > 0, `graded` gives scores between, `greedy=False` lets R exceed S."""
    assert released(planted_traces(2000, seed=1, quality=0.8))["never"].gt(0).mean() == pytest.approx(0.8, abs=0.05)
    graded = planted_traces(200, seed=1, graded=True).rollouts["score"]
    assert ((graded > 0) & (graded < 1)).any()
    sampled = released(planted_traces(200, seed=1, greedy=False))
    assert (sampled["score"] > sampled["never"]).any()
    assert not (released(planted_traces(200, seed=1))["score"] > released(planted_traces(200, seed=1))["never"]).any()


def test_joined_sets_keep_every_request() -> None:
    """Two tasks in one set keep their requests, and the meta lists both."""
    both = joined(planted_traces(40, seed=1), planted_traces(30, seed=1, task="chat", kind="unsafe"))
    assert both.requests["task"].value_counts().to_dict() == {"sql": 40, "chat": 30}
    assert set(both.meta.tasks) == {"sql", "chat"}


@pytest.mark.parametrize("population", [Population(), Population(graded=True), Population(greedy=False)])
def test_population_trades_loss_for_share(population: Population) -> None:
    """Lower thresholds release earlier, at a larger mean loss; all values lie in [0, 1]."""
    never, result, share = population.draw(20_000, seed=1)
    for values in (never, result, share):
        assert values.min() >= 0
        assert values.max() <= 1
    assert (np.diff(share.mean(axis=0)) < 0).all()
    assert (never.mean() - result[:, -1].mean()) > 0.1 > (never.mean() - result[:, 0].mean())
