"""Random LightGBM boosters, and rows that lie where their comparisons are decided by the last bit."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import lightgbm
import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

ZERO = np.float32(1e-35)
MISSING: list[dict[str, Any]] = [{}, {"zero_as_missing": True}, {"use_missing": False}]
# Values that LightGBM, or a GPU, treats as it treats no others.
SPECIAL = [np.nan, np.inf, -np.inf, 0.0, -0.0, ZERO, -ZERO, 9.9e-36, -9.9e-36, 1.1e-35, -1.1e-35, 1e-42, -1e-42]
SPECIAL_THRESHOLDS = ["inf", "-inf", "1e300", "-1e300", "0", "-0", "-1e-36", "1e-36", "-1e-35", "1e-300", "-1e-300"]


@dataclass(frozen=True)
class Drawn:
    """A booster's text, and rows with what the booster that LightGBM reads from it says of them."""

    text: str
    names: list[str]
    rows: npt.NDArray[np.float32]
    scores: npt.NDArray[np.float64]


def train(rng: np.random.Generator, columns: int, rounds: int, params: dict[str, Any]) -> lightgbm.Booster:
    """A binary booster on integers, zeros, near zeros and normal values with gaps, all float32."""
    x = rng.normal(size=(300, columns)).astype(np.float32)
    x[:, 0] = rng.integers(-3, 4, 300)
    x[rng.random(x.shape) < 0.1] = 0.0
    x[rng.random(x.shape) < 0.05] = 5e-36
    x[rng.random(x.shape) < rng.choice([0.0, 0.2])] = np.nan
    y = np.nan_to_num(x).sum(1) + 0.3 * np.isnan(x).sum(1) > rng.normal(size=300)
    base = {"objective": "binary", "verbose": -1, "num_threads": 1, "min_data_in_leaf": 1, "min_data_in_bin": 1}
    return lightgbm.train({**base, **params}, lightgbm.Dataset(x, y, params={"verbose": -1}), rounds)


def with_thresholds(text: str, rng: np.random.Generator) -> str:
    """The model with other thresholds: float32 values, their neighbours among doubles, and the special ones."""

    def drawn(count: int) -> str:
        exact = rng.integers(-3, 4, count) + rng.choice([0.0, np.float64(np.float32(0.1))], count)
        near = np.nextafter(exact, rng.choice([-np.inf, np.inf], count))
        plain = np.where(rng.random(count) < 0.5, exact, near)
        return " ".join(repr(float(t)) if rng.random() < 0.7 else str(rng.choice(SPECIAL_THRESHOLDS)) for t in plain)

    head, *blocks = text.partition("end of trees")[0].split("Tree=")
    blocks = [
        "Tree=" + re.sub("^threshold=(.+)$", lambda m: "threshold=" + drawn(len(m[1].split())), block, flags=re.M)
        for block in blocks
    ]
    head = re.sub("^tree_sizes=.*$", "tree_sizes=" + " ".join(str(len(b)) for b in blocks), head, flags=re.M)
    return head + "".join(blocks) + "end of trees\n\n"


def rows_at_thresholds(text: str, columns: int, rng: np.random.Generator, n: int) -> npt.NDArray[np.float32]:
    """[n, columns], each value a threshold's float32, one of its neighbours, or a special one."""
    listed = " ".join(re.findall("^threshold=(.+)$", text, flags=re.M)).split()
    with np.errstate(over="ignore", under="ignore"):
        at = np.array(listed, dtype=np.float64).astype(np.float32)
        beside = [np.nextafter(at, np.float32(side)) for side in (-np.inf, np.inf)]
    pool = np.concatenate([at, *beside, np.array(SPECIAL, dtype=np.float32)])
    return rng.choice(pool, size=(n, columns))


@st.composite
def drawn_models(draw: st.DrawFn, n: int = 24) -> Drawn:
    """Models over data sets, rounds, leaves, depths, missing values, sigmoids and thresholds, with `n` rows each."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    columns, rounds = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    params: dict[str, Any] = {
        "num_leaves": draw(st.integers(2, 40)),
        "max_depth": draw(st.sampled_from([-1, 1, 4])),
        "sigmoid": draw(st.sampled_from([1.0, 0.7])),
        "boosting": draw(st.sampled_from(["gbdt", "dart"])),
        **draw(st.sampled_from(MISSING)),
    }
    booster = train(rng, columns, rounds, params)
    text = str(booster.model_to_string())
    if draw(st.booleans()):
        text = with_thresholds(text, rng)
    rows = rows_at_thresholds(text, columns, rng, n)
    scores = lightgbm.Booster(model_str=text).predict(rows, num_threads=1)
    return Drawn(text, booster.feature_name(), rows, np.asarray(scores, dtype=np.float64))
