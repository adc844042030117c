"""Every baseline's score means what its name says, and a higher threshold always means a later release."""

import numpy as np
import pytest

from lorazor.training.baselines import ORACLE, ReleasePolicy, feature, simple_policies
from lorazor.training.replay import ReplayTable, summarize, sweep
from tests.planted import planted_traces
from tests.training.tiny_traces import tiny_traces


@pytest.fixture(scope="module")
def table() -> ReplayTable:
    """The tiny traces (see their docstring)."""
    return ReplayTable.from_traces(tiny_traces(), "sql", 6.0)


@pytest.fixture(scope="module")
def planted() -> ReplayTable:
    """300 planted requests."""
    return ReplayTable.from_traces(planted_traces(300, seed=1), "sql", 40.0)


@pytest.fixture(scope="module")
def policies() -> dict[str, ReleasePolicy]:
    """The simple policies by name."""
    return {p.name: p for p in simple_policies(0, {"sql": 6.0, "chat": 6.0})}


def test_fixed_step_and_fraction(table: ReplayTable, policies: dict[str, ReleasePolicy]) -> None:
    """The fixed step releases at the first r of the grid at or past it, the fraction at that share of the mean."""
    at_three = table.first_decision(policies["fixed step"].score(table), 3)
    assert table.outcome(at_three).release.tolist() == [3, 3, 3]
    at_four = table.first_decision(policies["fixed step"].score(table), 4)
    assert table.outcome(at_four).release.tolist() == [6, 5, 4]
    half = table.first_decision(policies["fixed fraction"].score(table), 0.5)
    assert half.tolist() == at_three.tolist()


def test_signal_thresholds_release_where_the_adapter_is_sure(table: ReplayTable) -> None:
    """Entropy and KL count low as safe, margin high; at admission none of them exists, so none releases there."""
    scores = {p.name: p.score(table) for p in simple_policies(0, {"sql": 6.0})}
    later = table.step > 0
    for name in ("entropy", "margin", "KL"):
        assert np.isnan(scores[name][~later]).all()
    assert scores["entropy"][later] == pytest.approx(-0.1 * table.step[later])
    assert scores["margin"][later] == pytest.approx(0.8)
    assert scores["KL"][later] == pytest.approx(-0.5)


def test_random_is_per_request_and_uniform(planted: ReplayTable, policies: dict[str, ReleasePolicy]) -> None:
    """A request's draws don't depend on the others; a threshold of 0.8 releases a fifth of the decisions."""
    scores = policies["random"].score(planted)
    half = planted.subset(np.arange(len(planted)) % 2 == 0)
    assert np.array_equal(policies["random"].score(half), scores[planted.request % 2 == 0])
    assert np.mean(scores >= 0.8) == pytest.approx(0.2, abs=0.04)
    assert not np.array_equal(simple_policies(1, {"sql": 6.0})[2].score(planted), scores)


def test_oracle_takes_the_earliest_safe_release(table: ReplayTable) -> None:
    """By hindsight a goes at r = 6, b at r = 1 and c at r = 3, at no drop."""
    outcome = table.outcome(table.first_decision(ORACLE.score(table), 1.0))
    assert outcome.release.tolist() == [6, 1, 3]
    assert summarize(table, outcome, solved_only=True).drop == 0


def test_a_higher_threshold_is_a_later_release(planted: ReplayTable) -> None:
    """For every baseline the active-row share never falls from one threshold to the next, up to never."""
    for policy in [*simple_policies(0, {"sql": 40.0}), ORACLE]:
        scores = policy.score(planted)
        share = sweep(planted, scores, np.append(np.unique(scores[~np.isnan(scores)])[::50], np.inf)).share
        assert (np.diff(share) >= 0).all(), policy.name
        assert share[0] < share[-1] == 1.0, policy.name


def test_feature_takes_the_column_by_name(planted: ReplayTable) -> None:
    """`step` of the features is the decision step."""
    assert np.array_equal(feature(planted, "step"), planted.step)
