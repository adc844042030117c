"""Recorded requests give the features that the server saw, to the last bit."""

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lorazor.features.grid import decision_steps, is_decision_step
from lorazor.features.offline import decision_features
from lorazor.features.schema import FEATURES
from lorazor.features.window import Window


def _recorded(rng: np.random.Generator, lengths: np.ndarray, interval: int) -> tuple[np.ndarray, np.ndarray]:
    """Random signals and probes, missing here and there; probed exactly at the decision steps."""
    total = int(lengths.sum())
    signals = rng.normal(size=(total, 4)).astype(np.float32)
    signals[rng.random((total, 4)) < 0.05] = np.nan
    probes = rng.normal(size=(total, 5)).astype(np.float32)
    probes[:, 2] = rng.random(total) < 0.5
    probes[rng.random((total, 5)) < 0.05] = np.inf
    step = np.concatenate([np.arange(n) for n in lengths]) if len(lengths) else np.empty(0)
    probes[[not is_decision_step(int(c), interval) for c in step]] = np.nan
    return signals, probes


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 9))
def test_offline_equals_online(seed: int, sizes: list[int], interval: int) -> None:
    """Requests that a server steps in random batches, in rows used again and again, get the offline features."""
    rng = np.random.default_rng(seed)
    lengths = np.array(sizes)
    signals, probes = _recorded(rng, lengths, interval)
    prompt, limit = rng.integers(1, 99, (2, len(sizes)))
    mean = rng.uniform(1, 9, len(sizes))
    offline = decision_features(signals, probes, lengths, prompt, limit, mean, interval)
    online = _serve(rng, signals, probes, lengths, (prompt, limit, mean), interval)
    assert list(zip(offline.request, offline.step, strict=True)) == sorted(online)
    for row, key in zip(offline.features, sorted(online), strict=True):
        np.testing.assert_array_equal(row, online[key])


def _serve(
    rng: np.random.Generator,
    signals: np.ndarray,
    probes: np.ndarray,
    lengths: np.ndarray,
    request: tuple[np.ndarray, np.ndarray, np.ndarray],
    interval: int,
) -> dict[tuple[int, int], np.ndarray]:
    """A server with three rows: admits as a row gets free, steps a random part of the batch, reads at decisions."""
    window, first = Window(3), np.cumsum(lengths) - lengths
    waiting, free = list(rng.permutation(len(lengths))), [2, 0, 1]
    running: dict[int, int] = {}
    done: dict[int, int] = {}
    seen: dict[tuple[int, int], np.ndarray] = {}
    while waiting or running:
        while waiting and free:
            i = int(waiting.pop())
            running[i], done[i] = free.pop(), 0
            row = torch.tensor([running[i]])
            window.reset(row, *(torch.tensor([float(value[i])]) for value in request))
            if 0 in decision_steps(lengths[i], interval):
                seen[i, 0] = window.features(row)[0].numpy()
        batch = [i for i in rng.permutation(list(running)) if rng.random() < 0.7]
        rows = torch.tensor([running[i] for i in batch], dtype=torch.int64)
        at = [first[i] + done[i] for i in batch]
        window.push(rows, torch.from_numpy(signals[at]), torch.from_numpy(probes[at]))
        for i, features in zip(batch, window.features(rows).numpy(), strict=True):
            if done[i] in decision_steps(lengths[i], interval)[1:]:
                seen[int(i), done[i]] = features
            done[i] += 1
            if done[i] == lengths[i]:
                free.append(running.pop(i))
    return seen


def test_decisions_come_by_request_and_step() -> None:
    """Decisions are ordered by request and then by step, whatever the order of the lengths; a short one has none."""
    lengths = np.array([4, 1, 20])
    rng = np.random.default_rng(0)
    got = decision_features(*_recorded(rng, lengths, 8), lengths, 5, 64, np.nan, 8)
    assert list(zip(got.request.tolist(), got.step.tolist(), strict=True)) == [
        (0, 0),
        (0, 1),
        (2, 0),
        (2, 1),
        (2, 8),
        (2, 16),
    ]
    assert got.features[:, FEATURES.index("step")].tolist() == got.step.tolist()
    assert got.features.dtype == np.float32
    assert np.isnan(got.features[:, FEATURES.index("step_over_mean")]).all()


def test_no_requests() -> None:
    """No request, no decision."""
    got = decision_features(np.empty((0, 4)), np.empty((0, 5)), [], [], [], [], 8)
    assert got.features.shape == (0, len(FEATURES))
    assert got.request.size == got.step.size == 0


def test_shapes_that_do_not_fit() -> None:
    """Rows that are not the sum of the lengths are refused, with the numbers."""
    with pytest.raises(ValueError, match="signals has 3 rows, probes 3, and the lengths sum to 4"):
        decision_features(np.zeros((3, 4)), np.zeros((3, 5)), [4], 1, 1, 1, 8)


def test_a_million_rows_take_seconds() -> None:
    """A million step rows are turned into features in well under ten seconds on one core."""
    rng = np.random.default_rng(0)
    lengths = np.full(10_000, 100)
    signals, probes = rng.normal(size=(1_000_000, 4)), rng.normal(size=(1_000_000, 5))
    start = time.perf_counter()
    got = decision_features(signals, probes, lengths, 10, 128, 100.0, 8)
    assert time.perf_counter() - start < 10.0
    assert len(got.features) == 10_000 * len(decision_steps(100, 8))
