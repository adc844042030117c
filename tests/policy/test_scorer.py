"""Scores are LightGBM's to the last bit, and no text, however bad, gets past the checks or kills the process."""

import re
import subprocess
import sys
from collections.abc import Callable

import lightgbm
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from lorazor.features.errors import InputError
from lorazor.features.schema import FEATURES
from lorazor.policy.model_text import checked_model_text
from lorazor.policy.scorer import Scorer, _parse_in_child

VALUES = st.one_of(st.floats(width=32), st.sampled_from([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-38]))


@pytest.fixture(scope="module")
def scorer(model_txt: str) -> Scorer:
    """The scorer of the session's model."""
    return Scorer(model_txt)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.integers(0, 40).flatmap(lambda n: arrays(np.float32, (n, len(FEATURES)), elements=VALUES, fill=VALUES)))
def test_scores_are_lightgbms_bits(scorer: Scorer, booster: lightgbm.Booster, rows: np.ndarray) -> None:
    """Any batch of any size, NaN and infinities included, gets exactly what Booster.predict gives, alone too."""
    scores = scorer.score(rows)
    assert scores.dtype == np.float64
    np.testing.assert_array_equal(scores, booster.predict(rows) if len(rows) else [])
    np.testing.assert_array_equal(scores, [scorer.score(row[None])[0] for row in rows])


def test_many_rows_are_lightgbms_bits(scorer: Scorer, booster: lightgbm.Booster) -> None:
    """Fifty thousand rows on one thread score as on all of LightGBM's threads."""
    rows = np.random.default_rng(1).normal(size=(50_000, len(FEATURES))).astype(np.float32)
    np.testing.assert_array_equal(scorer.score(rows), booster.predict(rows))
    np.testing.assert_array_equal(scorer.score(np.asfortranarray(rows)), booster.predict(rows))


def test_wrong_width_is_refused(scorer: Scorer) -> None:
    """Rows with another number of features are a caller's mistake, not a silent zero."""
    with pytest.raises(ValueError, match=r"must be \[n, 35\], got \[2, 34\]"):
        scorer.score(np.zeros((2, 34), dtype=np.float32))


def test_importance_is_a_share_of_the_gain(scorer: Scorer, booster: lightgbm.Booster) -> None:
    """The two features that decide the label lead, and the shares sum to 1."""
    importance = scorer.importance()
    assert set(list(importance)[:2]) == {FEATURES[0], FEATURES[5]}
    assert sum(importance.values()) == pytest.approx(1.0)
    assert scorer.trees == booster.num_trees()


@pytest.mark.parametrize("labels", [np.zeros(400), np.r_[0.0, np.ones(399)]], ids=["one class", "nearly"])
def test_model_without_a_split(labels: np.ndarray) -> None:
    """A model that could not learn anything is still a model: it loads and scores as LightGBM says."""
    rows = np.random.default_rng(0).normal(size=(400, len(FEATURES))).astype(np.float32)
    data = lightgbm.Dataset(rows, labels, feature_name=list(FEATURES))
    booster = lightgbm.train({"objective": "binary", "verbose": -1, "num_threads": 1}, data, 3)
    np.testing.assert_array_equal(Scorer(booster.model_to_string()).score(rows), booster.predict(rows))


@pytest.mark.parametrize(
    "params",
    [
        {"boosting": "dart"},
        {"data_sample_strategy": "goss"},
        {"use_missing": False},
        {"zero_as_missing": True},
        {"is_unbalance": True},
        {"num_leaves": 127, "min_data_in_leaf": 2},
        {"monotone_constraints": [1] + [0] * (len(FEATURES) - 1)},
        {"max_bin": 7},
    ],
    ids=lambda params: next(iter(params)),
)
def test_what_training_may_choose_still_loads(params: dict[str, object]) -> None:
    """Models of other training settings pass the checks and keep their scores."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(1000, len(FEATURES))).astype(np.float32)
    rows[rng.random(rows.shape) < 0.1] = np.nan
    data = lightgbm.Dataset(rows, np.nan_to_num(rows[:, 0]) > 0, feature_name=list(FEATURES), params={"verbose": -1})
    booster = lightgbm.train({"objective": "binary", "verbose": -1, "num_threads": 1, **params}, data, 5)
    np.testing.assert_array_equal(Scorer(booster.model_to_string()).score(rows), booster.predict(rows))


def _replace(pattern: str, new: str) -> Callable[[str], str]:
    def damage(text: str) -> str:
        damaged, count = re.subn(pattern, new, text, count=1, flags=re.MULTILINE)
        assert count == 1
        return damaged

    return damage


def _resized(pattern: str, new: str) -> Callable[[str], str]:
    """A hostile author keeps tree_sizes right, so that the damage reaches the parser."""

    def damage(text: str) -> str:
        damaged = _replace(pattern, new)(text)
        first = int(re.search(r"tree_sizes=(\d+)", text)[1]) + len(damaged) - len(text)  # type: ignore[index]
        return re.sub(r"tree_sizes=\d+", f"tree_sizes={first}", damaged)

    return damage


HOSTILE: dict[str, tuple[Callable[[str], str], str]] = {
    "empty": (lambda text: "", "not the text of a LightGBM model"),
    "another file": (lambda text: "hello\n" * 100, "not the text of a LightGBM model"),
    "binary": (lambda text: "tree\n\x00\udcff", "not the text of a LightGBM model"),
    "cut in the header": (lambda text: text[:200], "cut off before the first tree"),
    "cut in a tree": (lambda text: text[: text.index("Tree=3") + 99], "tree 3 is cut off"),
    "cut between trees": (lambda text: text[: text.index("Tree=3")], "tree 3 is cut off"),
    "cut at the end": (lambda text: text[: text.index("end of trees")], "cut off, or more trees"),
    "another version": (_replace("^version=v4", "version=v9"), "version must be v4, got v9"),
    "another objective": (_replace("^objective=.*", "objective=regression"), "the objective must be binary"),
    "several classes": (_replace("^num_class=1", "num_class=3"), "num_class must be 1, got 3"),
    "another feature": (_replace(" kl ", " kli "), "the feature 'kli' where the schema has 'kl'"),
    "a feature less": (_replace(" kl ", " "), "the model has 34 features, the schema 35"),
    "unknown header": (_replace("^num_class=1", "num_class=1\naverage_output"), "not a new key=value"),
    "huge tree size": (_replace(r"tree_sizes=\d+", "tree_sizes=9999999999"), "tree 0 is cut off"),
    "no leaves": (_resized("^num_leaves=15", "num_leaves=0"), "tree 0 has 0 leaves"),
    "a billion leaves": (_resized("^num_leaves=15", "num_leaves=1999999999"), "must have 1999999999"),
    "feature out of range": (_resized(r"^split_feature=\d+", "split_feature=35"), "a feature that does not exist"),
    "negative feature": (_resized(r"^split_feature=\d+", "split_feature=-7"), "a feature that does not exist"),
    "cycle": (_resized(r"^left_child=-?\d+", "left_child=0"), "do not form a tree"),
    "child out of range": (_resized(r"^left_child=-?\d+", "left_child=123456"), "do not form a tree"),
    "number of 400 digits": (_resized(r"^leaf_value=\S+", "leaf_value=" + "9" * 400), "finite numbers"),
    "number that is none": (_resized(r"^leaf_value=\S+", "leaf_value=nan"), "finite numbers"),
    "threshold of words": (_resized(r"^threshold=\S+", "threshold=os.system"), "finite numbers"),
    "a leaf value less": (_resized(r"^leaf_value=\S+ ", "leaf_value="), "leaf_value has 14 values, must have 15"),
    "a count less": (_resized(r"^leaf_count=\S+ ", "leaf_count="), "leaf_count has 14 values, must have 15"),
    "categorical": (_resized("^num_cat=0", "num_cat=1"), "categorical splits"),
    "linear": (_resized("^is_linear=0", "is_linear=1"), "linear leaves"),
    "decision of another kind": (_resized(r"^decision_type=\d+", "decision_type=1"), "unknown decision_type"),
}


@pytest.mark.parametrize(("damage", "reason"), HOSTILE.values(), ids=HOSTILE.keys())
def test_bad_text_is_refused_with_a_reason(model_txt: str, damage: Callable[[str], str], reason: str) -> None:
    """Each kind of damage ends in one sentence that names model.txt and what is wrong with it."""
    with pytest.raises(InputError, match=r"^model\.txt: ") as error:
        Scorer(damage(model_txt))
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_random_damage_is_refused_or_harmless(model_txt: str, data: st.DataObject) -> None:
    """Text with random characters changed anywhere raises InputError, or LightGBM says what is wrong with it (in the
    child, for a Scorer), or passes as a well-formed model; it never crashes or hangs."""
    at = data.draw(st.integers(0, len(model_txt) - 1))
    new = data.draw(st.text(st.characters(max_codepoint=300), max_size=5))
    damaged = model_txt[:at] + new + model_txt[at + data.draw(st.integers(0, 40)) :]
    try:
        checked = checked_model_text(damaged, FEATURES)
    except InputError:
        return
    try:
        booster = lightgbm.Booster(model_str=checked)
    except lightgbm.basic.LightGBMError:
        return
    scores = booster.predict(np.zeros((2, len(FEATURES)), dtype=np.float32))
    assert ((scores >= 0.0) & (scores <= 1.0)).all()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda text: text[:300], r"LightGBM('s parser died of it| cannot read it)"),
        (_replace(r"tree_sizes=\d+", "tree_sizes=99999999999"), r"LightGBM('s parser died of it| cannot read it)"),
        (_resized(r"^left_child=-?\d+", "left_child=0"), r"did not finish reading it in 3 s"),
        (_replace("^feature_names=entropy", "feature_names=entropie"), "other feature names"),
    ],
    ids=["cut", "wild size", "cycle", "names"],
)
def test_child_process_is_a_second_line(model_txt: str, damage: Callable[[str], str], reason: str) -> None:
    """Text that did get past the first check makes LightGBM abort or hang in the child only, and is refused."""
    with pytest.raises(InputError, match=reason):
        _parse_in_child(damage(model_txt), FEATURES, 3.0)


def test_scorer_needs_neither_torch_nor_vllm_in_the_child() -> None:
    """The child's program imports nothing heavy, so that a server's start does not wait for it."""
    code = (
        "import runpy, sys, io; sys.stdin = io.StringIO('');\n"
        "try: runpy.run_path(sys.argv[1], run_name='__main__')\n"
        "except Exception: pass\n"
        "print([m for m in ('torch', 'vllm', 'pandas', 'lorazor') if sys.modules.get(m)])"
    )
    probe = Scorer.__init__.__globals__["_PROBE"]
    done = subprocess.run([sys.executable, "-P", "-c", code, str(probe)], capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "[]"
