"""Calls the policy so that nothing it does reaches a request: exception, hang and NaN all mean "keep the adapter"."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger("vllm.lorazor")

Score = Callable[[NDArray[np.float32]], NDArray[np.float64]]


class GuardedScorer:
    """A scorer with a time limit that answers NaN instead of failing; it is not asked again while a call still hangs.

    Args:
        score: features float32[n, F] -> scores float64[n].
        timeout: seconds that one call may take.
        on_failure: called with the reason ("exception", "timeout", "nan" or "shape") of each failed call.
    """

    def __init__(self, score: Score, timeout: float, on_failure: Callable[[str], None]) -> None:
        self._score, self._timeout, self._on_failure = score, timeout, on_failure
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lorazor-policy")
        self._late: Future[NDArray[np.float64]] | None = None
        self._logged: set[str] = set()

    def __call__(self, features: NDArray[np.float32]) -> NDArray[np.float64]:
        """Scores float64[n]; NaN where there is none."""
        nothing = np.full(len(features), np.nan)
        if self._late is not None and not self._late.done():
            return self._failed("timeout", "still hangs", nothing)
        call = self._late = self._thread.submit(self._score, features)
        try:
            scores = call.result(self._timeout)
        except FutureTimeout:
            return self._failed("timeout", f"took over {self._timeout} s", nothing)
        except Exception as error:
            return self._failed("exception", f"raised {error!r}", nothing)
        if not isinstance(scores, np.ndarray) or scores.shape != nothing.shape:
            return self._failed("shape", f"gave {np.shape(scores)} scores for {len(features)} rows", nothing)
        return self.checked(scores)

    def checked(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        """The scores that somebody gave, float64[n]; NaN among them is a failed call."""
        if np.isnan(scores).any():
            self._failed("nan", "gave NaN", scores)
        return scores

    def _failed(self, reason: str, what: str, nothing: NDArray[np.float64]) -> NDArray[np.float64]:
        self._on_failure(reason)
        if reason not in self._logged:
            self._logged.add(reason)
            logger.warning("LoRazor: the policy %s; its requests keep their adapters (logged once)", what)
        return nothing
