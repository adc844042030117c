"""The split is by request and the same for the same ids; what cannot be learned from is refused in a sentence."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorazor.features.errors import InputError
from lorazor.training.dataset import prepare, stack
from lorazor.training.labels import safe
from lorazor.training.split import split_requests, without
from lorazor.training.traces import TraceSet
from tests.planted import joined, planted_traces
from tests.training.tiny_traces import tiny_traces


@pytest.fixture(scope="module")
def traces() -> TraceSet:
    """Two tasks, 200 and 100 requests."""
    return joined(planted_traces(200, seed=1), planted_traces(100, seed=2, task="chat"))


def test_split_is_a_partition_of_requests_in_equal_shares_of_each_task(traces: TraceSet) -> None:
    """Every request lies in exactly one part, and each task gives 60, 20 and 20 percent."""
    split = split_requests(traces.requests, seed=0)
    parts = (split.train, split.validation, split.test)
    assert sum(map(len, parts)) == len(frozenset.union(*parts)) == len(traces.requests)
    for task, n in (("sql", 200), ("chat", 100)):
        assert [sum(i.startswith(task) for i in part) for part in parts] == [0.6 * n, 0.2 * n, 0.2 * n]


def test_split_follows_ids_and_seed_not_the_order_of_rows(traces: TraceSet) -> None:
    """Shuffled rows give the same parts; another seed gives others."""
    shuffled = traces.requests.sample(frac=1, random_state=3)
    assert split_requests(shuffled, seed=0) == split_requests(traces.requests, seed=0)
    assert split_requests(traces.requests, seed=1) != split_requests(traces.requests, seed=0)


@given(st.lists(st.uuids().map(str), unique=True), st.floats(0, 0.99), st.floats(0, 0.99))
def test_who_is_left_out_depends_on_nobody_else(ids: list[str], share: float, other: float) -> None:
    """Nor on the order; and a larger share leaves out the same ones and more."""
    kept = without(ids, share, seed=0)
    assert kept == [i for i in ids if without([i], share, seed=0)]
    assert set(without(ids, max(share, other), seed=0)) <= set(kept)


def test_a_share_is_left_out() -> None:
    """About as many as asked, others with another seed; none at all, or a share that is none."""
    ids = [f"request {k}" for k in range(4000)]
    kept = without(ids, 0.3, seed=0)
    assert abs(len(kept) - 2800) < 150
    assert kept != without(ids, 0.3, seed=1)
    assert without(ids, 0.0, seed=0) == ids
    for share in (-0.1, 1.0, float("nan")):
        with pytest.raises(InputError, match="at least 0 and below 1, got"):
            without(ids, share, seed=0)


def test_too_few_requests_are_refused() -> None:
    """Three requests cannot be split."""
    with pytest.raises(InputError, match="task 'sql' has 3 requests; training needs at least 10"):
        prepare(tiny_traces(), seed=0)


def test_shares_must_leave_something_to_train_on(traces: TraceSet) -> None:
    """Validation and test together may not take everything."""
    with pytest.raises(InputError, match="must be above 0 and sum to below 1"):
        split_requests(traces.requests, seed=0, validation=0.5, test=0.5)


def test_no_request_and_no_mean_leaks_between_parts(traces: TraceSet) -> None:
    """Tables hold the split's requests, and the mean output length is that of the training requests alone."""
    data = prepare(traces, seed=0)
    for tables, ids in (
        (data.train, data.split.train),
        (data.validation, data.split.validation),
        (data.test, data.split.test),
    ):
        assert {str(i) for table in tables.values() for i in table.request_id} == ids
    assert data.mean_output_tokens["chat"] == pytest.approx(data.train["chat"].length.mean())
    assert data.mean_output_tokens["chat"] != pytest.approx(data.test["chat"].length.mean())


def test_stack_is_one_task_after_the_other(traces: TraceSet) -> None:
    """Features and labels of all tasks in the tables' order."""
    data = prepare(traces, seed=0)
    x, y = stack(data.train)
    n = len(data.train["sql"].step)
    assert np.array_equal(y[:n], safe(data.train["sql"]))
    assert np.array_equal(x[n:], data.train["chat"].features, equal_nan=True)


def test_one_class_labels_are_refused_by_task_and_class() -> None:
    """Where no release, or every release, is safe there is nothing to learn; the sentence says which."""
    with pytest.raises(InputError, match=r"task 'sql': every label is 'unsafe' \(no release keeps the score\)"):
        prepare(planted_traces(60, seed=1, kind="unsafe"), seed=0)
    traces = planted_traces(60, seed=1)
    kept = traces.rollouts.assign(score=np.float32(1), same_text=True)
    with pytest.raises(InputError, match=r"task 'sql': every label is 'safe' \(no release lowers a score\)"):
        prepare(replace(traces, rollouts=kept), seed=0)


def test_requests_without_a_decision_are_refused() -> None:
    """Outputs of one token have no release step below their length, and too few others teach nothing."""
    traces = planted_traces(60, seed=1)
    steps = traces.steps[traces.steps["step"] == 0].reset_index(drop=True)
    rollouts = traces.rollouts[traces.rollouts["mode"] != "released"]
    short = replace(traces, steps=steps, rollouts=rollouts.assign(output_tokens=np.int32(1)))
    assert isinstance(short.requests, pd.DataFrame)
    with pytest.raises(
        InputError, match="0 training requests are long enough to have a decision; training needs at least 5"
    ):
        prepare(short, seed=0)
