"""Scores of live requests on the host: a window of their own each, and none asked for twice at admission."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lorazor.features.window import Window
from lorazor.policy.artifact import Artifact
from lorazor.runtime.scoring import Followed
from tests.runtime.policies import safe_from_step, save_policy

MEAN = 20.0


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A policy of two adapters and a task."""
    return save_policy(
        Path(tmp_path_factory.mktemp("policy")) / "artifact", safe_from_step(1), "0" * 64, {"a": "0" * 64}
    )


def scored(features: NDArray[Any]) -> NDArray[Any]:
    """A score that tells every two windows apart, NaN where a prompt has 3 tokens."""
    prompt = features[:, -5].astype(np.float64)
    return np.where(prompt == 3, np.nan, np.nan_to_num(features.astype(np.float64)) @ np.arange(features.shape[1]))


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_scores_are_those_of_a_window_each(artifact: Artifact, seed: int) -> None:
    """Admissions, steps, ends and rows used again in any order, in any company, also of requests not followed."""
    rng = np.random.default_rng(seed)
    followed = Followed(artifact, 5, 5.0, lambda why: None)
    windows: dict[str, Window] = {}
    followed.score._score = scored
    for t in range(30):
        if len(windows) < 5 and rng.random() < 0.6:
            tokens = int(rng.integers(1, 6))
            assert followed.start(f"r{t}", "open", tokens, 40)
            windows[f"r{t}"] = Window(1)
            windows[f"r{t}"].reset(torch.zeros(1, dtype=torch.long), tokens, 40, MEAN)
        for gone in [i for i in windows if rng.random() < 0.1]:
            followed.stop(gone)
            del windows[gone]
        stepped = [i for i in windows if rng.random() < 0.4]
        ids = rng.permutation([*stepped, "stranger"]).tolist()
        x, y = (torch.tensor(rng.normal(size=(len(ids), n)), dtype=torch.float32) for n in (4, 5))
        followed.push(ids, x, y)
        for k, i in enumerate(ids):
            if i in windows:
                windows[i].push(torch.zeros(1, dtype=torch.long), x[k : k + 1], y[k : k + 1])
        asked = [i for i in windows if rng.random() < 0.7]
        found = followed.scores(asked)
        assert set(found) == set(asked)
        for i in asked:
            wanted = float(scored(windows[i].features(torch.zeros(1, dtype=torch.long)).numpy())[0])
            assert found[i] == (None if math.isnan(wanted) else pytest.approx(wanted, rel=1e-12))


def test_admissions_alike_are_asked_for_once(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal requests share a score, failures are asked for again, and the oldest score goes when there are too many."""
    monkeypatch.setattr("lorazor.runtime.scoring.KEPT_SCORES", 2)
    calls: list[int] = []

    def score(features: NDArray[Any]) -> NDArray[Any]:
        calls.append(len(features))
        return scored(features)

    followed = Followed(artifact, 20, 5.0, lambda why: None)
    followed.score._score = score

    def ask(*prompts: int) -> list[int]:
        ids = [f"r{len(calls)}-{k}" for k in range(len(prompts))]
        for request_id, tokens in zip(ids, prompts, strict=True):
            assert followed.start(request_id, "open", tokens, 40)
        calls.clear()
        followed.scores(ids)
        for request_id in ids:
            followed.stop(request_id)
        return list(calls)

    assert ask(1, 2) == [2]
    assert ask(1, 2, 1) == []
    assert ask(1, 3) == [1]
    assert ask(3) == [1]
    assert ask(4) == [1]
    assert ask(1) == []
    assert ask(2) == [1]
