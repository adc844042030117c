"""The guard around the policy: late answers, recovery, logging once."""

from __future__ import annotations

import logging
import threading
from typing import Any

import numpy as np
import pytest

from lorazor.runtime.guard import GuardedScorer


def test_a_late_policy_is_asked_again_once_it_has_answered() -> None:
    """While a call hangs the others fail at once; when it returns, the policy is back."""
    gate = threading.Event()
    failures: list[str] = []

    def score(features: Any) -> Any:
        gate.wait()
        return np.ones(len(features))

    guarded = GuardedScorer(score, 0.05, failures.append)
    features = np.zeros((2, 3), np.float32)
    assert np.isnan(guarded(features)).all()
    assert np.isnan(guarded(features)).all()
    assert failures == ["timeout", "timeout"]
    gate.set()
    guarded._late.result()  # type: ignore[union-attr]
    assert guarded(features).tolist() == [1.0, 1.0]


def test_one_bad_row_costs_only_itself(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A NaN among the scores is no score for its row alone; each reason is logged once."""
    failures: list[str] = []
    guarded = GuardedScorer(lambda x: np.array([0.5, np.nan]), 1.0, failures.append)
    logger = logging.getLogger("vllm.lorazor")
    monkeypatch.setattr(logger, "propagate", False)  # as vLLM sets its loggers up, wherever this test runs
    caplog.set_level(logging.WARNING, logger.name)  # a library that is imported elsewhere raises pytest's handler's
    logger.addHandler(caplog.handler)
    for _ in range(3):
        assert np.isnan(guarded(np.zeros((2, 3), np.float32))).tolist() == [False, True]
    logger.removeHandler(caplog.handler)
    assert failures == ["nan"] * 3
    assert len(caplog.records) == 1
