"""Windows against a slow reference for one request, written in plain Python with NumPy's float32 scalars."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from lorazor.features.schema import FEATURES
from lorazor.features.signals import ADAPTER_SIGNALS, PROBE_SIGNALS
from lorazor.features.window import Window

F32 = np.float32
NAN = F32("nan")
VALUES = st.one_of(st.floats(-10, 10, width=32), st.sampled_from([np.nan, np.inf, -np.inf]))
AGREES = PROBE_SIGNALS.index("base_top1_agrees")


def reference(signals: np.ndarray, probes: np.ndarray, prompt: float, limit: float, mean: float) -> list[np.float32]:
    """The features after the last of the steps given, in the order of FEATURES, straight from the definitions."""
    x = [dict(zip(ADAPTER_SIGNALS, map(_known, row), strict=True)) for row in signals]
    y = [dict(zip(PROBE_SIGNALS, map(_known, row), strict=True)) for row in probes]
    probed = [t for t, row in enumerate(probes) if not np.isnan(row).all()]
    out: dict[str, np.float32] = {}
    for name in ADAPTER_SIGNALS:
        seen = [row[name] for row in x]
        fast, slow = _average(seen, F32(0.25)), _average(seen, F32(0.0625))
        out |= {name: seen[-1] if seen else NAN, f"{name}_fast": fast, f"{name}_slow": slow}
        out[f"{name}_slope"] = fast - slow
    out["token_logprob_mean"] = _mean([row["token_logprob"] for row in x])
    out["entropy_max"] = max(_only([row["entropy"] for row in x]), default=NAN)
    out["margin_min"] = min(_only([row["margin"] for row in x]), default=NAN)
    last, before = (y[probed[-1]] if probed else None), (y[probed[-2]] if len(probed) > 1 else None)
    out |= last or dict.fromkeys(PROBE_SIGNALS, NAN)
    out["logprob_gap"] = x[probed[-1]]["token_logprob"] - last["base_token_logprob"] if last else NAN
    out["kl_mean"] = _mean([row["kl"] for row in y])
    out["kl_slope"] = last["kl"] - before["kl"] if last and before else NAN
    agreements = _only([row["base_top1_agrees"] for row in y])
    streak = next((k for k, agrees in enumerate(reversed(agreements)) if not agrees), len(agreements))
    out["agreement_streak"] = F32(streak) if agreements else NAN
    out["agreement_rate"] = _mean(agreements)
    out["steps_since_probe"] = F32(len(x) - 1 - probed[-1]) if probed else NAN
    step = F32(max(len(x) - 1, 0))
    out |= {"prompt_tokens": F32(prompt), "max_tokens": F32(limit), "step": step}
    out |= {"step_over_max": step / F32(limit), "step_over_mean": step / F32(mean)}
    return [out[name] for name in FEATURES]


def _known(value: np.float32) -> np.float32:
    return value if np.isfinite(value) else NAN


def _only(values: list[np.float32]) -> list[np.float32]:
    return [v for v in values if not np.isnan(v)]


def _mean(values: list[np.float32]) -> np.float32:
    total = F32(0)
    for value in _only(values):
        total = total + value
    return total / F32(len(_only(values))) if _only(values) else NAN


def _average(values: list[np.float32], rate: np.float32) -> np.float32:
    average = NAN
    for value in _only(values):
        average = value if np.isnan(average) else average + (value - average) * rate
    return average


@st.composite
def requests(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Signals and probes of up to 12 steps: gaps, infinities, and unprobed steps included."""
    steps = draw(st.integers(0, 12))
    signals = draw(arrays(np.float32, (steps, len(ADAPTER_SIGNALS)), elements=VALUES))
    probes = draw(arrays(np.float32, (steps, len(PROBE_SIGNALS)), elements=VALUES))
    probes[:, AGREES] = draw(arrays(np.float32, steps, elements=st.sampled_from([0.0, 1.0, np.nan])))
    probes[draw(arrays(np.bool_, steps))] = np.nan
    return signals, probes


def _rows(*rows: int) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64)


def _feature(window: Window, row: int, name: str) -> float:
    return float(window.features(_rows(row))[0, FEATURES.index(name)])


def _push(window: Window, row: int, signals: list[float], probes: list[float] | None = None) -> None:
    missing = [float("nan")] * len(PROBE_SIGNALS)
    window.push(_rows(row), torch.tensor([signals]), torch.tensor([probes or missing]))


@settings(max_examples=300)
@given(requests())
def test_window_equals_the_reference(request_: tuple[np.ndarray, np.ndarray]) -> None:
    """Whatever the steps, each feature is the reference's to the last bit."""
    signals, probes = request_
    window = Window(3)
    window.reset(_rows(1), 7, 40, 12.5)
    for x, y in zip(signals, probes, strict=True):
        window.push(_rows(1), torch.from_numpy(x[None]), torch.from_numpy(y[None]))
    with np.errstate(all="ignore"):
        wanted = np.array(reference(signals, probes, 7, 40, 12.5), dtype=np.float32)
    np.testing.assert_array_equal(window.features(_rows(1)).numpy()[0], wanted)


def test_admission_knows_the_request_only() -> None:
    """Before any step the window features are missing and the request's are there."""
    window = Window(2)
    window.reset(_rows(0, 1), torch.tensor([5, 6]), torch.tensor([64, 32]), torch.tensor([20.0, float("nan")]))
    known = window.features(_rows(0, 1))[:, FEATURES.index("prompt_tokens") :]
    assert known[0].tolist() == [5.0, 64.0, 0.0, 0.0, 0.0]
    assert known[1, :4].tolist() == [6.0, 32.0, 0.0, 0.0]
    assert torch.isnan(known[1, 4])
    assert torch.isnan(window.features(_rows(0, 1))[:, : FEATURES.index("prompt_tokens")]).all()


def test_step_counts_output_tokens_before_this_step() -> None:
    """After the push of decode step c the feature step is c: that is what a decision at c knows."""
    window = Window(1)
    window.reset(_rows(0), 1, 8, 4)
    for _ in range(3):
        _push(window, 0, [1.0, 0.5, 0.2, -1.0])
    assert _feature(window, 0, "step") == 2.0
    assert _feature(window, 0, "step_over_max") == 0.25
    assert _feature(window, 0, "step_over_mean") == 0.5


@pytest.mark.parametrize("gap", [float("nan"), float("inf"), -float("inf")])
def test_missing_value_does_not_poison(gap: float) -> None:
    """A step whose signals are missing shows as missing, and the averages go on as if it had not been."""
    with_gap, without = Window(1), Window(1)
    for window in (with_gap, without):
        window.reset(_rows(0), 1, 8, 4)
        _push(window, 0, [1.0, 0.5, 0.2, -1.0])
    _push(with_gap, 0, [gap] * 4)
    assert np.isnan(_feature(with_gap, 0, "entropy"))
    for window in (with_gap, without):
        _push(window, 0, [2.0, 0.4, 0.1, -2.0])
    same = [FEATURES.index(name) for name in FEATURES if not name.startswith("step")]
    torch.testing.assert_close(
        with_gap.features(_rows(0))[:, same], without.features(_rows(0))[:, same], rtol=0, atol=0, equal_nan=True
    )


def test_agreement_streak_starts_again() -> None:
    """The streak counts the agreeing probes since the last that did not agree; unprobed steps don't end it."""
    window = Window(1)
    window.reset(_rows(0), 1, 99, 4)
    streaks = []
    for agrees in (1.0, None, 1.0, 0.0, 1.0):
        _push(window, 0, [1.0] * 4, None if agrees is None else [0.1, 0.1, agrees, -1.0, 1.0])
        streaks.append(_feature(window, 0, "agreement_streak"))
    assert streaks == [1.0, 1.0, 2.0, 0.0, 1.0]
    assert _feature(window, 0, "agreement_rate") == 0.75


def test_reset_forgets_the_previous_request() -> None:
    """A row that is used again remembers nothing, and its neighbour everything."""
    window, fresh = Window(2), Window(2)
    window.reset(_rows(0, 1), 1, 8, 4)
    _push(window, 0, [1.0] * 4, [1.0] * 5)
    _push(window, 1, [3.0] * 4, [0.0] * 5)
    neighbour = window.features(_rows(1))
    for each in (window, fresh):
        each.reset(_rows(0), 2, 16, 8)
    torch.testing.assert_close(window.features(_rows(0)), fresh.features(_rows(0)), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(window.features(_rows(1)).nan_to_num(), neighbour.nan_to_num())


@pytest.mark.gpu
def test_cuda_gives_the_cpus_bits() -> None:
    """The same steps pushed on CUDA and on the CPU give the same features to the last bit."""
    generator = torch.Generator().manual_seed(0)
    cpu, cuda, rows = Window(64), Window(64, device="cuda"), torch.arange(64)
    cpu.reset(rows, 33, 97, 41.7)
    cuda.reset(rows.cuda(), 33, 97, 41.7)
    for step in range(50):
        x, y = torch.randn(64, 4, generator=generator), torch.randn(64, 5, generator=generator)
        y[:, AGREES] = (y[:, AGREES] > 0).float()
        y[step % 3 :: 3], x[step % 7, step % 4] = float("nan"), float("nan")
        cpu.push(rows, x, y)
        cuda.push(rows.cuda(), x.cuda(), y.cuda())
        got = cuda.features(rows.cuda()).cpu()
        torch.testing.assert_close(got, cpu.features(rows), rtol=0, atol=0, equal_nan=True)
