"""The comparison of policies: thresholds are chosen as described, and everything is measured on the test requests."""

import numpy as np
import pytest

from lorazor.training.baselines import ORACLE, simple_policies
from lorazor.training.compare import area, candidates, choose, compare
from lorazor.training.dataset import Dataset, prepare
from lorazor.training.replay import Curve, ReplayTable, sweep
from tests.planted import joined, planted_traces


@pytest.fixture(scope="module")
def data() -> Dataset:
    """Planted data of a task where release is often safe and one where it never is."""
    return prepare(joined(planted_traces(300, 1), planted_traces(200, 2, task="chat", kind="unsafe")), seed=0)


def test_candidates_hold_what_decides(data: Dataset) -> None:
    """Among the thresholds are the least and the greatest score, and no NaN."""
    table = data.train["sql"]
    scores = np.where(table.step == 0, np.nan, np.random.default_rng(0).random(len(table.step)))
    found = candidates({"sql": table}, {"sql": scores})
    assert (found[0], found[-1]) == (np.nanmin(scores), np.nanmax(scores))
    assert (np.diff(found) > 0).all()
    assert len(candidates({"sql": table}, {"sql": np.full(len(scores), np.nan)})) == 0


def curve(share: list[float], drop: list[float]) -> Curve:
    """A curve at thresholds 0, 1, 2, …"""
    n = np.zeros(len(share))
    return Curve(np.arange(len(share), dtype=np.float64), np.array(share), np.array(drop), n, n)


def test_choose_takes_the_least_share_within_the_limit() -> None:
    """The smallest share whose drop is allowed wins, of equal ones the strictest; None when nothing saves."""
    one = curve([0.1, 0.4, 0.4, 0.9], [0.5, 0.01, 0.01, 0.0])
    assert choose([one], 0.01) == 2
    assert choose([one], 0.6) == 0
    assert choose([one], 0.005) == 3
    assert choose([one], -0.1) is None
    assert choose([curve([1.0, 1.0], [0.0, 0.0])], 0.01) is None
    other = curve([0.2, 0.3, 0.6, 0.8], [0.0, 0.2, 0.005, 0.0])
    assert choose([one, other], 0.01) == 2
    assert choose([curve([0.5], [np.nan])], 0.01) is None


def test_area_by_hand() -> None:
    """With retention 1 at every share the area is 1 less the triangle up to the prompt-only point."""
    table = ReplayTable.from_traces(planted_traces(400, seed=4), "sql", 40.0)
    prompt_only = sweep(table, np.where(table.step == 0, 0.0, np.nan), [0.0], solved_only=True).retention[0]
    flat = Curve(*(np.array(v, dtype=np.float64) for v in ([1, 2], [0.2, 0.6], [0, 0], [1, 1], [1, 1])))
    assert area(table, flat) == pytest.approx(0.2 * (prompt_only + 1) / 2 + 0.8)


def test_compare_measures_on_the_test_requests(data: Dataset) -> None:
    """Every policy has a row per limit, counts of the test part, and the oracle no drop; never-safe stays never."""
    found = compare([*simple_policies(0, data.mean_output_tokens), ORACLE], data.validation, data.test, (0.01, 0.03))
    rows = found["sql"].rows
    assert [r.policy for r in rows[:2]] == ["never", "base only"]
    assert {(r.policy, r.limit) for r in rows[2:]} == {
        (name, limit)
        for name in ("fixed step", "fixed fraction", "random", "entropy", "margin", "KL", "oracle")
        for limit in (0.01, 0.03)
    }
    assert all(r.everything.n == len(data.test["sql"]) for r in rows)
    oracle = rows[-1].judged
    assert oracle is not None
    assert oracle.drop == 0
    assert oracle.active_row_share < 0.6
    for row in found["chat"].rows:
        if row.policy in ("fixed step", "oracle"):
            assert row.threshold is None
            assert row.everything.active_row_share == 1


def test_a_shared_threshold_must_hold_for_every_task(data: Dataset) -> None:
    """The fraction that suits one task is not taken when the other task drops at it."""
    found = compare(simple_policies(0, data.mean_output_tokens), data.validation, data.test, (0.5,))
    points = {t: {r.policy: r.threshold for r in c.rows} for t, c in found.items()}
    assert points["sql"]["fixed step"] is not None
    assert points["sql"]["fixed fraction"] == points["chat"]["fixed fraction"]


def test_a_task_that_its_adapter_never_solves_has_no_judged_numbers(data: Dataset) -> None:
    """Where S = 0 everywhere the judged columns and the area are null, and nothing is released."""
    failed = {"sql": data.test["sql"].subset(data.test["sql"].score == 0)}
    found = compare([ORACLE], failed, failed, (0.01,))["sql"]
    assert all(r.judged is None and r.everything.drop is None for r in found.rows)
    assert found.area["oracle"] is None
    assert found.rows[-1].threshold is None
