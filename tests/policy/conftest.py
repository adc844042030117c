"""A small real model on the real feature schema, and a manifest that fits it."""

import lightgbm
import numpy as np
import numpy.typing as npt
import pytest

from lorazor.features.schema import FEATURES, PROBE_FEATURES, SCHEMA_HASH
from lorazor.policy.manifest import AdapterEntry, Guarantee, Manifest, TaskPolicy

BASE = "b" * 64
SQL = "5" * 64


def train(seed: int = 0, rounds: int = 12, leaves: int = 15, probes: bool = True) -> lightgbm.Booster:
    """A binary booster on random features with gaps, whose label two of them decide; without probes, on no probe's."""
    rows = random_features(np.random.default_rng(seed), 2000)
    if not probes:
        rows[:, [FEATURES.index(name) for name in PROBE_FEATURES]] = np.nan
    labels = np.nan_to_num(rows[:, 0]) + np.nan_to_num(rows[:, 5]) > 0.3
    data = lightgbm.Dataset(rows, labels.astype(int), feature_name=list(FEATURES))
    params = {"objective": "binary", "num_leaves": leaves, "verbose": -1, "num_threads": 1, "seed": seed}
    return lightgbm.train(params, data, rounds)


def random_features(rng: np.random.Generator, n: int) -> npt.NDArray[np.float32]:
    """[n, F] with a tenth of the values missing."""
    rows = rng.normal(size=(n, len(FEATURES))).astype(np.float32)
    rows[rng.random(rows.shape) < 0.1] = np.nan
    return rows


@pytest.fixture(scope="session")
def booster() -> lightgbm.Booster:
    """The model that LightGBM trained, as the authority on its scores."""
    return train()


@pytest.fixture(scope="session")
def model_txt(booster: lightgbm.Booster) -> str:
    """Its text."""
    return str(booster.model_to_string())


@pytest.fixture
def manifest() -> Manifest:
    """A manifest with a tuned task, a task without a threshold, and an adapter."""
    guarantee = Guarantee(kind="relative", max_drop=0.05, confidence=0.9, n=1500, loss=0.01, bound=0.04)
    return Manifest(
        schema_hash=SCHEMA_HASH,
        features=list(FEATURES),
        probe_interval=8,
        base_fingerprint=BASE,
        adapters=[AdapterEntry(name="sql-lora", fingerprint=SQL, task="sql")],
        tasks={
            "sql": TaskPolicy(threshold=0.75, mean_output_tokens=23.0, guarantee=guarantee),
            "chat": TaskPolicy(mean_output_tokens=100.0),
        },
        threshold_grid={"sql": [0.5, 0.75, 0.9]},
        trained_on=["0123456789abcdef"],
        made={"command": "lorazor train traces"},
    )
