"""LightGBM is fitted twice: what is judged never saw the test requests, what ships learnt from every request."""

from dataclasses import replace

import lightgbm as lgb
import numpy as np
import pytest

from lorazor.features.grid import release_grid
from lorazor.policy.artifact import load_artifact
from lorazor.training.baselines import ReleasePolicy
from lorazor.training.compare import compare
from lorazor.training.dataset import Dataset, prepare
from lorazor.training.learned import LEARNED, ROUNDS, WITHOUT_PROBES
from lorazor.training.report import TrainReport
from lorazor.training.save import request_hash
from lorazor.training.traces import TraceSet
from lorazor.training.train import DROP_LIMITS, fit, train
from tests.planted import joined, planted_traces


@pytest.fixture(scope="module")
def traces() -> TraceSet:
    """Two tasks, one of them noisy."""
    return joined(planted_traces(200, seed=1, noise=1.0), planted_traces(100, seed=2, task="chat"))


@pytest.fixture(scope="module")
def data(traces: TraceSet) -> Dataset:
    """What `train` makes of the traces."""
    return prepare(traces, seed=0)


@pytest.fixture(scope="module")
def policies(data: Dataset) -> dict[str, ReleasePolicy]:
    """All policies as they are compared."""
    return {policy.name: policy for policy in fit(data, seed=0)}


@pytest.fixture(scope="module")
def report(traces: TraceSet, tmp_path_factory: pytest.TempPathFactory) -> TrainReport:
    """One training run."""
    return train(traces, tmp_path_factory.mktemp("refit") / "policy", mlflow_uri=None)


def with_other_outcomes(traces: TraceSet, ids: frozenset[str]) -> TraceSet:
    """The same traces, but for `ids` a release is safe where it was not and the reverse."""
    rollouts = traces.rollouts
    changed = rollouts["request_id"].isin(ids) & (rollouts["mode"] == "released")
    score = rollouts["score"].where(~changed, 1 - rollouts["score"]).astype(np.float32)
    return replace(traces, rollouts=rollouts.assign(score=score, same_text=rollouts["same_text"] ^ changed))


def test_only_what_is_refitted_has_seen_the_test_requests(
    traces: TraceSet, data: Dataset, policies: dict[str, ReleasePolicy]
) -> None:
    """With other outcomes of the test requests every policy scores as before; its refit does not."""
    other = prepare(with_other_outcomes(traces, data.split.test), seed=0)
    assert other.split == data.split
    table = data.test["sql"]
    for policy in fit(other, seed=0):
        before = policies[policy.name]
        assert np.array_equal(policy.score(table), before.score(table), equal_nan=True), policy.name
        if policy.refit and before.refit:
            assert not np.allclose(policy.refit()(table), before.refit()(table)), policy.name
    refitted = {"progress only", "logistic", WITHOUT_PROBES, LEARNED}
    assert {name for name, policy in policies.items() if policy.refit} == refitted


def test_the_report_is_of_policies_that_never_saw_the_test_requests(
    report: TrainReport, data: Dataset, policies: dict[str, ReleasePolicy]
) -> None:
    """Its rows are those of a comparison without any refit, and it says so."""
    found = compare(list(policies.values()), data.validation, data.test, DROP_LIMITS)
    for task, comparison in found.items():
        assert report.tasks[task].comparison.rows == comparison.rows
    assert "the policies above learnt from the training requests; the artifact's from all 300" in report.render()


def test_the_artifact_has_learnt_from_all_that_it_lists(report: TrainReport, traces: TraceSet) -> None:
    """Its first tree counts every decision of every request, and all of these are in `trained_on`."""
    artifact = load_artifact(report.artifact)
    lengths, g = traces.requests["length"], traces.meta.probe_interval
    decisions = sum(len(release_grid(int(length), g)) for length in lengths)
    booster = lgb.Booster(model_file=str(report.artifact / "model.txt"))
    assert booster.dump_model()["tree_info"][0]["tree_structure"]["internal_count"] == decisions
    assert artifact.manifest.trained_on == sorted(request_hash(str(i)) for i in traces.requests["request_id"])
    assert artifact.scorer.trees == report.rounds == ROUNDS


def test_the_grid_holds_scores_of_unseen_requests(
    report: TrainReport, data: Dataset, policies: dict[str, ReleasePolicy]
) -> None:
    """Each threshold is a score that the model judged gave to a request unseen; the model that ships gives others."""
    grids = load_artifact(report.artifact).manifest.threshold_grid
    refit = policies[LEARNED].refit
    assert refit is not None
    held_out, shipped = policies[LEARNED].score, refit()
    assert grids.keys() == data.whole.keys()
    for task, grid in grids.items():
        assert set(grid) <= {score for part in (data.validation, data.test) for score in held_out(part[task])}
        assert not set(grid) & set(shipped(data.whole[task]))
