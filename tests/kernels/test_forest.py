"""The forest kernel against LightGBM: any model, values at thresholds, lists of rows, poisoned memory, company."""

from __future__ import annotations

from functools import cache
from typing import Any

import lightgbm
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lorazor.features.schema import FEATURES
from lorazor.policy.forest import parse_forest
from tests.kernels.cases import EXAMPLES
from tests.policy.boosters import Drawn, drawn_models
from tests.policy.conftest import random_features
from tests.policy.conftest import train as train_policy
from tests.runtime.policies import safe_from_step

# The order of additions differs from LightGBM's, all in float64. The aim is 1e-6.
RTOL, ATOL = 1e-13, 1e-15


def packed(text: str, device: str, names: Any = FEATURES) -> Any:
    """The model on the device."""
    from lorazor.kernels.forest import pack

    return pack(**vars(parse_forest(text, names)), device=device)


def score(forest: Any, features: torch.Tensor | np.ndarray[Any, Any], rows: torch.Tensor | None = None) -> torch.Tensor:
    """Scores from memory full of NaN."""
    from lorazor.kernels import forest as kernel

    on_device = torch.as_tensor(features, device=forest.records.device)
    out = torch.full((len(on_device),), float("nan"), dtype=torch.float64, device=on_device.device)
    return kernel.score(forest, on_device, rows=rows, out=out)


@cache
def model_text() -> str:
    """A small model of the real schema."""
    return str(train_policy(rounds=20).model_to_string())


@settings(deadline=None, max_examples=EXAMPLES)
@given(drawn_models(n=14))
def test_scores_are_lightgbms(device: str, drawn: Drawn) -> None:
    """Any model of any training, at its thresholds, beside them, at zeros, NaN and infinities."""
    found = score(packed(drawn.text, device, drawn.names), drawn.rows)
    np.testing.assert_allclose(found.cpu().numpy(), drawn.scores, rtol=RTOL, atol=ATOL)


def test_a_release_policy(device: str) -> None:
    """The runtime tests' policy: every step of a request, at admission and with signals missing."""
    text = safe_from_step(9)
    rows = random_features(np.random.default_rng(1), 40)
    rows[:, FEATURES.index("step")] = np.arange(40) % 20
    rows[20:, : FEATURES.index("prompt_tokens")] = np.nan
    found = score(packed(text, device), rows).cpu().numpy()
    np.testing.assert_allclose(found, lightgbm.Booster(model_str=text).predict(rows), rtol=RTOL, atol=ATOL)
    assert {bool(s > 0.5) for s in found} == {True, False}


def test_more_trees_than_one_block(device: str) -> None:
    """300 trees of 31 leaves take two blocks, the second one partly empty."""
    booster = train_policy(rounds=300, leaves=31)
    rows = random_features(np.random.default_rng(2), 9)
    forest = packed(booster.model_to_string(), device)
    assert forest.records.shape[0] == 2
    np.testing.assert_allclose(score(forest, rows).cpu().numpy(), booster.predict(rows), rtol=RTOL, atol=ATOL)


def test_leaves_alone_and_no_tree(device: str) -> None:
    """A model that learnt nothing scores its constant, and one without trees one half."""
    rows = random_features(np.random.default_rng(0), 400)
    data = lightgbm.Dataset(rows, np.r_[0.0, np.ones(399)], feature_name=list(FEATURES))
    booster = lightgbm.train({"objective": "binary", "verbose": -1, "num_threads": 1}, data, 2)
    text = booster.model_to_string()
    found = score(packed(text, device), rows[:5]).cpu().numpy()
    np.testing.assert_allclose(found, booster.predict(rows[:5]), rtol=RTOL, atol=ATOL)
    empty = text[: text.index("tree_sizes=")] + "tree_sizes=\n\nend of trees\n"
    assert score(packed(empty, device), rows[:5]).tolist() == [0.5] * 5


@settings(deadline=None, max_examples=EXAMPLES // 4)
@given(st.permutations(range(9)), st.integers(1, 9))
def test_company_changes_no_bit(device: str, order: list[int], count: int) -> None:
    """A row's bits do not depend on the other rows, on their number, or on its place."""
    forest, rows = packed(model_text(), device), random_features(np.random.default_rng(4), 9)
    assert torch.equal(score(forest, rows[order[:count]]), score(forest, rows)[order[:count]])


def test_only_listed_rows_are_written(device: str) -> None:
    """Rows come in any order, -1 and numbers past the end are nobody, and wider memory is read in place."""
    forest, rows = (
        packed(model_text(), device),
        torch.from_numpy(random_features(np.random.default_rng(5), 6)).to(device),
    )
    wide = torch.cat([rows, torch.full((6, 13), float("nan"), device=device)], dim=1)
    listed = torch.tensor([4, -1, 0, 6, 3], dtype=torch.int32, device=device)
    found = score(forest, wide[:, :35], rows=listed)
    assert torch.equal(found[[4, 0, 3]], score(forest, rows)[[4, 0, 3]])
    assert found[[1, 2, 5]].isnan().all()
    assert score(forest, rows[:0]).shape == (0,)


def test_misfits_are_refused(device: str) -> None:
    """Other features, and trees that a record cannot hold, are errors that name what was found."""
    from lorazor.kernels import forest as kernel

    forest, rows = packed(model_text(), device), torch.zeros(3, 35, device=device)
    with pytest.raises(ValueError, match=r"float32 \[n, 35\], are torch\.float32 \(3, 34\)"):
        kernel.score(forest, rows[:, 1:])
    with pytest.raises(ValueError, match=r"are torch\.float64"):
        kernel.score(forest, rows.double())
    with pytest.raises(ValueError, match=r"float64 \[3\], is torch\.float32"):
        kernel.score(forest, rows, out=torch.zeros(3, device=device))
    with pytest.raises(ValueError, match=r"int32 \[k\]"):
        kernel.score(forest, rows, rows=torch.arange(3, device=device))
    trees = vars(parse_forest(model_text(), FEATURES))
    with pytest.raises(ValueError, match="found 16385 and"):
        kernel.pack(**trees | {"features": 16385}, device=device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_servers_shape_on_the_gpu() -> None:
    """256 rows, 200 trees of 31 leaves: LightGBM's scores, the same bits on every repeat and in a CUDA graph."""
    booster = train_policy(rounds=200, leaves=31)
    forest = packed(booster.model_to_string(), "cuda")
    rows = torch.from_numpy(random_features(np.random.default_rng(6), 256))
    on_device = rows.cuda()
    first = score(forest, on_device)
    np.testing.assert_allclose(first.cpu().numpy(), booster.predict(rows.numpy()), rtol=RTOL, atol=ATOL)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = score(forest, on_device)
    for _ in range(100):
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, first)
