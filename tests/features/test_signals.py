"""Signals against float64 formulas of scipy, and every edge case that the module's docstring defines."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import log_softmax
from scipy.stats import entropy

from lorazor.features.signals import ADAPTER_SIGNALS, PROBE_SIGNALS, adapter_signals, probe_signals

INF, NAN = math.inf, math.nan
LOGITS = st.one_of(st.floats(-40, 40, width=32), st.just(-INF))


def _matrices(count: int) -> st.SearchStrategy[list[np.ndarray]]:
    shape = st.tuples(st.integers(1, 4), st.integers(1, 9))
    return shape.flatmap(lambda s: st.lists(arrays(np.float32, s, elements=LOGITS), min_size=count, max_size=count))


def _ids(*ids: int) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int64)


def _named(names: tuple[str, ...], row: torch.Tensor) -> dict[str, float]:
    return dict(zip(names, row.tolist(), strict=True))


@given(_matrices(1))
def test_adapter_signals_follow_their_formulas(matrices: list[np.ndarray]) -> None:
    """Entropy, p1, the margin and the chosen token's log-probability equal the float64 formulas to 1e-5."""
    (logits,) = matrices
    signals = adapter_signals(torch.from_numpy(logits), torch.zeros(len(logits), dtype=torch.int64))
    for row, got in zip(logits.astype(np.float64), signals, strict=True):
        if np.isneginf(row).all():
            assert torch.isnan(got).all()
            continue
        log_p = log_softmax(row)
        p = np.sort(np.exp(log_p))[::-1]
        wanted = [entropy(p), p[0], p[0] - (p[1] if len(p) > 1 else 0.0), log_p[0]]
        np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-5, atol=1e-5)


@given(_matrices(2))
def test_probe_signals_follow_their_formulas(matrices: list[np.ndarray]) -> None:
    """The divergences equal scipy's in float64 to 1e-5, infinite where the base lacks a token of the adapter's."""
    logits, base = matrices
    tokens = torch.full((len(logits),), logits.shape[1] - 1)
    signals = probe_signals(torch.from_numpy(logits), torch.from_numpy(base), tokens)
    for x, y, row in zip(logits.astype(np.float64), base.astype(np.float64), signals, strict=True):
        if np.isneginf(x).all() or np.isneginf(y).all():
            assert torch.isnan(row).all()
            continue
        log_p, log_q = log_softmax(x), log_softmax(y)
        p, q = np.exp(log_p), np.exp(log_q)
        got = _named(PROBE_SIGNALS, row)
        # A probability below 1e-38 is zero in float32: only then may an infinite KL come out finite.
        if not np.any((log_p < -80) & np.isneginf(log_q)):
            assert got["kl"] == pytest.approx(entropy(p, q), rel=1e-5, abs=1e-5)
        middle = (p + q) / 2
        assert got["js"] == pytest.approx((entropy(p, middle) + entropy(q, middle)) / 2, rel=1e-4, abs=1e-5)
        assert got["base_top1_agrees"] == float(x.argmax() == y.argmax())
        assert got["base_token_logprob"] == pytest.approx(log_q[-1], rel=1e-5, abs=1e-5)
        assert got["base_entropy"] == pytest.approx(entropy(q), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("bad", [[NAN, 0.0, 1.0], [INF, 0.0, 1.0], [-INF, -INF, -INF]], ids=["nan", "inf", "all -inf"])
def test_a_row_without_a_distribution_is_missing_and_harms_no_other(bad: list[float]) -> None:
    """NaN, +inf or nothing but -inf makes that row's signals NaN; the next row is as if it were alone."""
    good = torch.tensor([[0.5, -1.0, 2.0]])
    logits = torch.cat([torch.tensor([bad]), good])
    signals = adapter_signals(logits, _ids(0, 2))
    assert torch.isnan(signals[0]).all()
    assert torch.equal(signals[1:], adapter_signals(good, _ids(2)))
    for first, second in ((logits, logits.flip(0)), (logits.flip(0), logits)):
        assert torch.isnan(probe_signals(first, second, _ids(0, 0))).all()
    assert torch.equal(probe_signals(logits, logits, _ids(0, 2))[1:], probe_signals(good, good, _ids(2)))


def test_vocabulary_of_one() -> None:
    """A vocabulary of one token is certain: entropy 0, top1_prob 1, margin 1, and the base agrees."""
    one = torch.tensor([[3.0]])
    assert adapter_signals(one, _ids(0)).tolist() == [[0.0, 1.0, 1.0, 0.0]]
    assert probe_signals(one, -one, _ids(0)).tolist() == [[0.0, 0.0, 1.0, 0.0, 0.0]]


def test_all_mass_on_one_token() -> None:
    """All mass on one token is certain too; any other chosen token has the log-probability -inf."""
    certain = torch.tensor([[-INF, 5.0, -INF]]).repeat(2, 1)
    assert adapter_signals(certain, _ids(1, 0)).tolist() == [[0.0, 1.0, 1.0, 0.0], [0.0, 1.0, 1.0, -INF]]
    assert not torch.signbit(adapter_signals(certain, _ids(1, 1))[:, 0]).any()


def test_disjoint_distributions() -> None:
    """Where the base gives nothing to the adapter's token, KL is infinite and Jensen-Shannon is ln 2."""
    p, q = torch.tensor([[0.0, -INF]]), torch.tensor([[-INF, 0.0]])
    assert probe_signals(p, q, _ids(0)).tolist() == [[INF, pytest.approx(math.log(2)), 0.0, -INF, 0.0]]


def test_base_may_have_more_tokens_than_the_adapter() -> None:
    """A token that only the base gives mass to adds nothing to KL(adapter ‖ base), which stays finite."""
    p, q = torch.tensor([[0.0, -INF]]), torch.tensor([[0.0, 0.0]])
    assert _named(PROBE_SIGNALS, probe_signals(p, q, _ids(0))[0])["kl"] == pytest.approx(math.log(2))


@pytest.mark.parametrize("token", [-1, 3, 2**40])
def test_token_outside_the_vocabulary(token: int) -> None:
    """A token id that does not exist makes only the two token log-probabilities missing, in its row only."""
    logits = torch.tensor([[0.5, -1.0, 2.0]]).repeat(2, 1)
    signals, probes = adapter_signals(logits, _ids(token, 1)), probe_signals(logits, logits, _ids(token, 1))
    assert torch.isnan(signals).nonzero().tolist() == [[0, ADAPTER_SIGNALS.index("token_logprob")]]
    assert torch.isnan(probes).nonzero().tolist() == [[0, PROBE_SIGNALS.index("base_token_logprob")]]


def test_tie_for_the_first_place() -> None:
    """Two tokens that share the first place leave a margin of 0, and the lower id counts as the argmax."""
    tied = torch.tensor([[1.0, 4.0, 4.0]])
    assert _named(ADAPTER_SIGNALS, adapter_signals(tied, _ids(1))[0])["margin"] == 0.0
    agrees = PROBE_SIGNALS.index("base_top1_agrees")
    assert probe_signals(tied, torch.tensor([[0.0, 1.0, 0.0]]), _ids(1))[0, agrees] == 1.0
    assert probe_signals(tied, torch.tensor([[0.0, 0.0, 1.0]]), _ids(1))[0, agrees] == 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_upcast(dtype: torch.dtype) -> None:
    """16-bit logits give the float32 signals of their float32 values, and are left as they are."""
    logits = torch.randn(5, 1000, generator=torch.Generator().manual_seed(0)).mul(4).to(dtype)
    before, tokens = logits.clone(), torch.arange(5)
    signals, probes = adapter_signals(logits, tokens), probe_signals(logits, logits.flip(0), tokens)
    assert signals.dtype == probes.dtype == torch.float32
    assert torch.equal(signals, adapter_signals(before.float(), tokens))
    assert torch.equal(probes, probe_signals(before.float(), before.float().flip(0), tokens))
    assert torch.equal(logits, before)


def test_float32_logits_are_left_as_they_are() -> None:
    """The server samples from these logits afterwards, so nothing may be written into them."""
    logits = torch.randn(3, 7)
    before = logits.clone()
    adapter_signals(logits, _ids(0, 1, 2))
    probe_signals(logits, logits, _ids(0, 1, 2))
    assert torch.equal(logits, before)


def test_no_rows() -> None:
    """An empty batch gives an empty answer."""
    none = torch.empty(0, 7)
    assert adapter_signals(none, _ids()).shape == (0, 4)
    assert probe_signals(none, none, _ids()).shape == (0, 5)


@pytest.mark.gpu
def test_cuda_agrees_with_cpu() -> None:
    """On CUDA the signals are the CPU's to 1e-5, edge cases included."""
    logits = torch.randn(9, 32000, generator=torch.Generator().manual_seed(0)) * 5
    logits[1, 4], logits[2, 4], logits[3], logits[4, 1:] = NAN, INF, -INF, -INF
    base, tokens = logits.roll(1, 0) + torch.randn(9, 32000), torch.tensor([0, 1, 2, 3, 0, -1, 32000, 7, 8])
    for cpu, cuda in (
        (adapter_signals(logits, tokens), adapter_signals(logits.cuda(), tokens.cuda())),
        (probe_signals(logits, base, tokens), probe_signals(logits.cuda(), base.cuda(), tokens.cuda())),
    ):
        torch.testing.assert_close(cuda.cpu(), cpu, rtol=1e-5, atol=1e-5, equal_nan=True)
