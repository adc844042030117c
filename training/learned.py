"""The policies that are fitted: LightGBM (the one that ships), LightGBM on progress alone, and logistic regression."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightgbm as lgb
import numpy as np
import numpy.typing as npt

from lorazor.features.schema import FEATURES, REQUEST_FEATURES
from lorazor.training.baselines import Score
from lorazor.training.dataset import Dataset, stack
from lorazor.training.replay import ReplayTable

Matrix = npt.NDArray[np.float32]
MAX_ROUNDS = 600
PATIENCE = 30
PARAMS: dict[str, Any] = {
    "objective": "binary",
    "metric": "binary_logloss",
    "learning_rate": 0.08,
    "num_leaves": 31,
    "min_data_in_leaf": 40,
    "feature_fraction": 0.8,
    "max_bin": 127,
    # The same data, seed and thread count give the same model text.
    "deterministic": True,
    "force_col_wise": True,
    "verbosity": -1,
}


def fit_lightgbm(data: Dataset, *, seed: int, threads: int, columns: Sequence[str] = FEATURES) -> lgb.Booster:
    """A binary LightGBM on the training decisions, stopped early by the log loss of the validation requests.

    Columns that are not in `columns` keep their place and are all missing, so every model takes [D, F].
    """
    (x, y), (xv, yv) = stack(data.train), stack(data.validation)
    train = lgb.Dataset(_only(x, columns), y, feature_name=list(FEATURES))
    booster = lgb.train(
        {**PARAMS, "seed": seed, "num_threads": threads},
        train,
        num_boost_round=MAX_ROUNDS,
        valid_sets=[lgb.Dataset(_only(xv, columns), yv, reference=train)] if len(yv) else None,
        callbacks=[lgb.early_stopping(PATIENCE, verbose=False)] if len(yv) else None,
    )
    # Through the text, so that what is measured here is what the artifact holds: the best iteration and no more.
    return lgb.Booster(model_str=booster.model_to_string(num_iteration=booster.best_iteration))


def fit_progress(data: Dataset, *, seed: int, threads: int) -> Score:
    """LightGBM that sees the request and its progress only, none of the signals."""
    booster = fit_lightgbm(data, seed=seed, threads=threads, columns=REQUEST_FEATURES)
    return lambda table: predict(booster, _only(table.features, REQUEST_FEATURES), threads)


def fit_logistic(data: Dataset, *, seed: int) -> Score:
    """scikit-learn's logistic regression on imputed and scaled features, with an indicator for each missing one."""
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    x, y = stack(data.train)
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
