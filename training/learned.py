"""The policies that are fitted: LightGBM (the one that ships), on all features or some, and logistic regression.

Each is fitted twice: on the training requests, to be judged on the test requests, and then on all, to be used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightgbm as lgb
import numpy as np
import numpy.typing as npt

from lorazor.features.schema import FEATURES, PROBE_FEATURES
from lorazor.training.baselines import ReleasePolicy, Score
from lorazor.training.dataset import Dataset, Tables, stack
from lorazor.training.labels import weight
from lorazor.training.replay import ReplayTable

Matrix = npt.NDArray[np.float32]
LEARNED, WITHOUT_PROBES = "LightGBM", "without probes"
"""The policies that may ship, as the comparison names them: LightGBM on all features, and on all but the probes'."""
UNPROBED = tuple(name for name in FEATURES if name not in PROBE_FEATURES)
"""The features of a policy without probes."""
ROUNDS = 256
PARAMS: dict[str, Any] = {
    "objective": "binary",
    # Many small trees with random thresholds: their sum is smoother in each signal than that of few trees with the best
    # ones, and a few hundred requests, whose decisions are much alike, hold no more than that.
    "extra_trees": True,
    "learning_rate": 0.1,
    "num_leaves": 8,
    "min_data_in_leaf": 20,
    "lambda_l2": 5.0,
    "max_bin": 127,
    # The same data, seed and thread count give the same model text.
    "deterministic": True,
    "force_col_wise": True,
    "verbosity": -1,
}


def fit_lightgbm(tables: Tables, *, seed: int, threads: int, columns: Sequence[str] = FEATURES) -> lgb.Booster:
    """A binary LightGBM on the decisions of `tables`, each weighted by what it would save (labels.weight).

    The number of rounds is fixed: cross-validated log-loss ends after a dozen or so where requests are few, long before
    the trees' order of the decisions, which is all that a threshold uses, is at its best.

    Columns that are not in `columns` keep their place and are all missing, so every model takes [D, F]. It never splits
    on those, so they need no hiding from its scores.
    """
    x, y = stack(tables)
    weights = np.concatenate([weight(table) for table in tables.values()])
    known = lgb.Dataset(_only(x, columns), y, weight=weights / weights.mean(), feature_name=list(FEATURES))
    return lgb.train({**PARAMS, "seed": seed, "num_threads": threads}, known, num_boost_round=ROUNDS)


def lightgbm_policy(
    name: str, data: Dataset, *, seed: int, threads: int, columns: Sequence[str] = FEATURES
) -> ReleasePolicy:
    """LightGBM on some features of the training requests' decisions, and at a refit of all requests'."""

    def score(tables: Tables) -> Score:
        booster = fit_lightgbm(tables, seed=seed, threads=threads, columns=columns)
        return lambda table: predict(booster, table.features, threads)

    return ReleasePolicy(name, score(data.train), refit=lambda: score(data.whole))


def fit_logistic(tables: Tables, *, seed: int) -> Score:
    """scikit-learn's logistic regression on imputed and scaled features, with an indicator for each missing one."""
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    x, y = stack(tables)
    kept = _sample(len(y), 200_000, seed)
    model = make_pipeline(
        SimpleImputer(strategy="median", add_indicator=True, keep_empty_features=True),
        StandardScaler(),
        LogisticRegression(max_iter=200),
    ).fit(_finite(x[kept]), y[kept])

    def score(table: ReplayTable) -> npt.NDArray[np.float64]:
        if not len(table.step):
            return np.empty(0)
        return np.asarray(model.predict_proba(_finite(table.features))[:, 1], dtype=np.float64)

    return score


def predict(booster: lgb.Booster, features: Matrix, threads: int = 1) -> npt.NDArray[np.float64]:
    """The booster's scores, float64 [D]; no rows give no scores."""
    if not len(features):
        return np.empty(0)
    return np.asarray(booster.predict(features, num_threads=threads), dtype=np.float64)


def _only(features: Matrix, columns: Sequence[str]) -> Matrix:
    hidden = [i for i, name in enumerate(FEATURES) if name not in columns]
    if not hidden:
        return features
    features = features.copy()
    features[:, hidden] = np.nan
    return features


def _finite(features: Matrix) -> Matrix:
    """Infinite values as missing (a linear model can't take them), and clipped to what float32 squares can hold."""
    return np.where(np.isfinite(features), np.clip(features, -1e15, 1e15), np.float32(np.nan))


def _sample(n: int, most: int, seed: int) -> npt.NDArray[np.int64]:
    """At most `most` of n row indices: a linear model gains nothing from more."""
    rows = np.arange(n)
    return rows if n <= most else np.random.default_rng(seed).choice(rows, most, replace=False)
