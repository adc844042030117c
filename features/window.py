"""What a request's past says at a decision step: the features that a policy scores, kept up to date step by step.

The server pushes one decode step of many requests at a time; `offline.py` pushes recorded steps through the same class.
Both must give the same bits whatever the batch size and the device. So only elementwise float32 operations that IEEE
754 rounds exactly are used (+ - * / min max), each as its own eager call (no fused multiply-add), and nothing is
divided by a Python number (CUDA multiplies by its reciprocal instead).

A signal that is NaN or infinite counts as missing: the "last" features then say so, averages and extremes keep what
they had, and counts don't count it.
"""

import math

import torch
from torch import Tensor

from lorazor.features.schema import FEATURES
from lorazor.features.signals import ADAPTER_SIGNALS, PROBE_SIGNALS

FAST_RATE = 1 / 4
SLOW_RATE = 1 / 16

_ENTROPY, _MARGIN, _LOGPROB = (ADAPTER_SIGNALS.index(name) for name in ("entropy", "margin", "token_logprob"))
_KL, _AGREES, _BASE_LOGPROB = (PROBE_SIGNALS.index(name) for name in ("kl", "base_top1_agrees", "base_token_logprob"))

# The state of a request: column name -> (columns, value before the first step).
_STATE = {
    "last": (len(ADAPTER_SIGNALS), math.nan),
    "fast": (len(ADAPTER_SIGNALS), math.nan),
    "slow": (len(ADAPTER_SIGNALS), math.nan),
    "logprob_sum": (1, 0.0),
    "logprob_count": (1, 0.0),
    "entropy_max": (1, math.nan),
    "margin_min": (1, math.nan),
    "probe": (len(PROBE_SIGNALS), math.nan),
    "gap": (1, math.nan),
    "kl_sum": (1, 0.0),
    "kl_count": (1, 0.0),
    "kl_slope": (1, math.nan),
    "streak": (1, 0.0),
    "agree_sum": (1, 0.0),
    "agree_count": (1, 0.0),
    "since_probe": (1, math.nan),
    "steps": (1, 0.0),
    "prompt_tokens": (1, math.nan),
    "max_tokens": (1, math.nan),
    "mean_output_tokens": (1, math.nan),
}
_WIDTHS = [width for width, _ in _STATE.values()]


class Window:
    """Features of up to `capacity` requests, each in a row that its owner picks and resets before use.

    The longest request may have 2^24 steps (float32 counts exactly to there).
    """

    def __init__(self, capacity: int, device: str | torch.device = "cpu") -> None:
        start = [value for width, value in _STATE.values() for _ in range(width)]
        self._start = torch.tensor(start, dtype=torch.float32, device=device)
        self._state = self._start.repeat(capacity, 1)

    def reset(
        self,
        rows: Tensor,
        prompt_tokens: Tensor | float,
        max_tokens: Tensor | float,
        mean_output_tokens: Tensor | float,
    ) -> None:
        """Start new requests in `rows` (int64 [n]); the rest are one number, or [n], of tokens (NaN = not known)."""
        state = self._start.repeat(len(rows), 1)
        for column, value in enumerate((prompt_tokens, max_tokens, mean_output_tokens), start=state.shape[1] - 3):
            state[:, column] = torch.as_tensor(value, dtype=torch.float32, device=state.device)
        self._state.index_copy_(0, rows, state)

    def push(self, rows: Tensor, signals: Tensor, probes: Tensor) -> None:
        """Take in one decode step of the requests in `rows` (int64 [n], each row once); the first is step 0.

        Args:
            rows: the rows that made this step.
            signals: [n, 4] float32, the columns of `ADAPTER_SIGNALS`.
            probes: [n, 5] float32, the columns of `PROBE_SIGNALS`; all NaN where the row was not probed.
        """
        self._state.index_copy_(0, rows, _advance(self._state.index_select(0, rows), signals, probes))

    def features(self, rows: Tensor) -> Tensor:
        """[n, F] float32 in the order of `FEATURES`: what a decision after the last pushed step may know.

        Before the first push that is a decision at admission, which knows the request and nothing of its output.
        """
        s = _split(self._state.index_select(0, rows))
        step = (s["steps"] - 1.0).clamp(min=0.0)
        columns = [
            s["last"],
            s["fast"],
            s["slow"],
            s["fast"] - s["slow"],
            s["logprob_sum"] / s["logprob_count"],
            s["entropy_max"],
            s["margin_min"],
            s["probe"],
            s["gap"],
            s["kl_sum"] / s["kl_count"],
            s["kl_slope"],
            torch.where(s["agree_count"] > 0.0, s["streak"], math.nan),
            s["agree_sum"] / s["agree_count"],
            s["since_probe"],
            s["prompt_tokens"],
            s["max_tokens"],
            step,
            step / s["max_tokens"],
            step / s["mean_output_tokens"],
        ]
        features = _finite(torch.cat(columns, dim=1))
        assert features.shape[1] == len(FEATURES)
        return features


def _advance(state: Tensor, signals: Tensor, probes: Tensor) -> Tensor:
    """The state [n, S] after one more step."""
    s = _split(state)
    x, y = _finite(signals), _finite(probes)
    probed = ~torch.isnan(probes).all(dim=1, keepdim=True)
    entropy, margin, logprob = _column(x, _ENTROPY), _column(x, _MARGIN), _column(x, _LOGPROB)
    kl, agrees = _column(y, _KL), _column(y, _AGREES)
    new = {
        "last": x,
        "fast": _average(s["fast"], x, FAST_RATE),
        "slow": _average(s["slow"], x, SLOW_RATE),
        "logprob_sum": _add(s["logprob_sum"], logprob),
        "logprob_count": _count(s["logprob_count"], logprob),
        "entropy_max": torch.fmax(s["entropy_max"], entropy),
        "margin_min": torch.fmin(s["margin_min"], margin),
        "probe": torch.where(probed, y, s["probe"]),
        "gap": torch.where(probed, logprob - _column(y, _BASE_LOGPROB), s["gap"]),
        "kl_sum": _add(s["kl_sum"], kl),
        "kl_count": _count(s["kl_count"], kl),
        "kl_slope": torch.where(probed, kl - _column(s["probe"], _KL), s["kl_slope"]),
        "streak": torch.where(torch.isnan(agrees), s["streak"], (s["streak"] + 1.0) * agrees),
        "agree_sum": _add(s["agree_sum"], agrees),
        "agree_count": _count(s["agree_count"], agrees),
        "since_probe": torch.where(probed, 0.0, s["since_probe"] + 1.0),
        "steps": s["steps"] + 1.0,
    }
    return torch.cat([new.get(name, s[name]) for name in _STATE], dim=1)


def _split(state: Tensor) -> dict[str, Tensor]:
    return dict(zip(_STATE, torch.split(state, _WIDTHS, dim=1), strict=True))


def _column(values: Tensor, index: int) -> Tensor:
    return values[:, index : index + 1]


def _finite(values: Tensor) -> Tensor:
    return torch.where(torch.isfinite(values), values, math.nan)


def _add(total: Tensor, value: Tensor) -> Tensor:
    return torch.where(torch.isnan(value), total, total + value)


def _count(count: Tensor, value: Tensor) -> Tensor:
    return count + (~torch.isnan(value)).float()


def _average(average: Tensor, value: Tensor, rate: float) -> Tensor:
    """Exponential moving average that starts at the first value and waits while the value is missing."""
    moved = average + (value - average) * rate
    started = torch.where(torch.isnan(average), value, moved)
    return torch.where(torch.isnan(value), average, started)
