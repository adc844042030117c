"""The arrays of `policy.forest` mean what LightGBM's text means, comparison by comparison."""

from __future__ import annotations

import lightgbm
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lorazor.features.errors import InputError
from lorazor.features.schema import FEATURES
from lorazor.policy.forest import ZERO, Forest, parse_forest, rounded_down
from lorazor.policy.scorer import Scorer
from tests.policy.boosters import SPECIAL, Drawn, drawn_models
from tests.policy.conftest import random_features


def walk(forest: Forest, row: npt.NDArray[np.float32]) -> list[float]:
    """The value of the leaf that each tree leads this row to, by the docstring's rule."""
    values = []
    for start, depth in zip(forest.first[:-1], forest.depth, strict=True):
        node = start
        for _ in range(depth):
            x = row[forest.feature[node]]
            left = x <= forest.threshold[node]
            if abs(x) <= ZERO:
                left = forest.zero_left[node]
            if np.isnan(x):
                left = forest.nan_left[node]
            node = start + forest.child[node] + (not left)
        values.append(float(forest.value[node]))
    return values


def scored(forest: Forest, rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Scores with LightGBM's order of additions, tree after tree."""
    totals = np.array([np.cumsum([0.0, *walk(forest, row)])[-1] for row in rows])
    return np.asarray(1.0 / (1.0 + np.exp(-forest.sigmoid * totals)), dtype=np.float64)


@settings(max_examples=40)
@given(drawn_models(n=12))
def test_every_comparison_is_lightgbms(drawn: Drawn) -> None:
    """At thresholds, beside them, at zeros, NaN and infinities: the same leaves, hence the same scores to 1e-15."""
    forest = parse_forest(drawn.text, drawn.names)
    np.testing.assert_allclose(scored(forest, drawn.rows), drawn.scores, rtol=1e-14, atol=1e-300)


@given(st.floats(), st.floats(width=32) | st.sampled_from(SPECIAL))
@example(float(np.float32(0.1)), 0.1)
@example(0.1, 0.1)
@example(1e300, np.inf)
@example(-1e300, -np.inf)
def test_rounding_down_keeps_every_comparison(threshold: float, value: float) -> None:
    """x <= t has one outcome in doubles and in float32, for every t and every float32 x that is not taken for zero."""
    x = np.float32(value)
    if np.isnan(threshold) or abs(x) <= ZERO:
        return
    (down,) = rounded_down(np.array([threshold]))
    assert (x <= down) == (float(x) <= threshold)
    assert not -ZERO < down < 0.0


@pytest.mark.parametrize("labels", [np.zeros(400), np.r_[0.0, np.ones(399)]], ids=["one class", "nearly"])
def test_model_without_a_split(labels: npt.NDArray[np.float64]) -> None:
    """Trees of a single leaf have depth 0 and their value at the root."""
    rows = np.random.default_rng(0).normal(size=(400, len(FEATURES))).astype(np.float32)
    data = lightgbm.Dataset(rows, labels, feature_name=list(FEATURES))
    booster = lightgbm.train({"objective": "binary", "verbose": -1, "num_threads": 1}, data, 3)
    forest = Scorer(booster.model_to_string()).forest()
    np.testing.assert_allclose(scored(forest, rows[:9]), booster.predict(rows[:9]), rtol=1e-14)


def test_no_tree(model_txt: str) -> None:
    """A model without trees is empty arrays, and scores one half."""
    head = model_txt[: model_txt.index("tree_sizes=")]
    forest = parse_forest(head + "tree_sizes=\n\nend of trees\n", FEATURES)
    assert [len(forest.child), len(forest.depth), forest.first.tolist()] == [0, 0, [0]]
    assert scored(forest, np.zeros((1, 35), np.float32)).tolist() == [0.5]


def test_the_layout(model_txt: str) -> None:
    """Level by level, siblings side by side, leaves lead to themselves, one value per leaf."""
    forest = parse_forest(model_txt, FEATURES)
    assert len(forest.depth) == 12
    for start, end in zip(forest.first[:-1], forest.first[1:], strict=True):
        child = forest.child[start:end]
        leaf = child == np.arange(end - start)
        assert child[~leaf].tolist() == list(range(1, end - start, 2))
        assert leaf.sum() == (~leaf).sum() + 1
        assert (forest.value[start:end][~leaf] == 0).all()
        assert (forest.threshold[start:end][leaf] == np.inf).all()


def test_the_features_that_are_split_on(booster: lightgbm.Booster, model_txt: str) -> None:
    """Those of LightGBM's own count; leaves, which name the first feature, are none."""
    counted = {name for name, n in zip(FEATURES, booster.feature_importance("split"), strict=True) if n}
    assert Scorer(model_txt).splits_on() == counted
    labels = np.arange(200) % 2
    rows = np.c_[np.zeros(200), labels, np.zeros((200, len(FEATURES) - 2))]
    data = lightgbm.Dataset(rows, labels, feature_name=list(FEATURES))
    model = lightgbm.train({"objective": "binary", "verbose": -1}, data, 2)
    assert Scorer(model.model_to_string()).splits_on() == {FEATURES[1]}


def test_the_scorers_forest_is_its_model(model_txt: str) -> None:
    """A loaded policy hands out the trees that it scores with."""
    scorer = Scorer(model_txt)
    rows = random_features(np.random.default_rng(3), 50)
    np.testing.assert_allclose(scored(scorer.forest(), rows), scorer.score(rows), rtol=1e-14)


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"objective": "regression"}, "the objective must be binary"),
        ({"objective": "multiclass", "num_class": 2}, "num_class must be 1, got 2"),
        ({"linear_tree": True}, "linear leaves"),
        ({"max_cat_to_onehot": 9}, "categorical splits"),
        ({"boosting": "rf", "bagging_freq": 1, "bagging_fraction": 0.5}, "the header has a line"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_other_kinds_of_model_are_refused(params: dict[str, object], reason: str) -> None:
    """What the arrays cannot say is refused in a sentence, never scored wrongly."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 5, size=(400, 3)).astype(np.float64)
    categorical: list[int] | str = [0] if "max_cat_to_onehot" in params else "auto"
    data = lightgbm.Dataset(x, x[:, 0] % 2, params={"verbose": -1}, categorical_feature=categorical)
    booster = lightgbm.train({"objective": "binary", "verbose": -1, "num_threads": 1, **params}, data, 2)
    with pytest.raises(InputError, match=reason):
        parse_forest(booster.model_to_string(), booster.feature_name())
