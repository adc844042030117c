"""The fused signals against `features.signals`: formulas, edge cases, lists of rows, poisoned memory, company."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from lorazor.features import signals as reference
from tests.kernels.cases import EXAMPLES

INF, NAN = math.inf, math.nan
# One chunk, ragged; a whole chunk; a chunk and one token; three ragged ones.
VOCABULARIES = [1, 7, 4096, 4097, 9001]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Against float64, and against the reference, which is float32 itself (over 128,256 tokens on a CPU it is off by 3e-4).
TOLERANCE = 1e-5
# NumPy, which interprets, warns of what the edge cases are made of.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def signals(
    logits: torch.Tensor, base: torch.Tensor, tokens: torch.Tensor, **lists: torch.Tensor | None
) -> torch.Tensor:
    """Both kernels' columns side by side, [n, 9], from memory full of NaN."""
    from lorazor.kernels.probe_signals import probe_signals
    from lorazor.kernels.signals import adapter_signals

    out, probes = (torch.full((len(logits), width), NAN, device=logits.device) for width in (4, 5))
    adapter_signals(logits, tokens, rows=lists.get("rows"), out=out)
    probe_signals(logits, base, tokens, **lists, out=probes)
    return torch.cat([out, probes], dim=1)


def exact(logits: torch.Tensor, base: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The definitions of features/signals.py in float64."""
    log_p, log_q = (t.double().log_softmax(1) for t in (logits, base))
    p, q = log_p.exp(), log_q.exp()
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    first, second = torch.cat([p, torch.zeros_like(p[:, :1])], 1).topk(2).values.unbind(1)
    js = (divergence(p, log_p, log_m) + divergence(q, log_q, log_m)) / 2
    agrees = (logits.argmax(1) == base.argmax(1)).double()
    chosen_p, chosen_q = (chosen(log, tokens) for log in (log_p, log_q))
    adapter = torch.stack([-divergence(p, log_p, 0 * p), first, first - second, chosen_p], 1)
    probe = torch.stack([divergence(p, log_p, log_q), js, agrees, chosen_q, -divergence(q, log_q, 0 * q)], 1)
    adapter[~log_p.amax(1).isfinite()] = NAN
    probe[~(log_p.amax(1) + log_q.amax(1)).isfinite()] = NAN
    return torch.cat([adapter, probe], 1)


def divergence(p: torch.Tensor, log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """Σ p (ln p - ln q) over p > 0."""
    return torch.where(p > 0, p * (log_p - log_q), 0.0).sum(1)


def chosen(log_p: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """ln p[token], NaN for no token."""
    known = (tokens >= 0) & (tokens < log_p.shape[1])
    return torch.where(known, log_p[range(len(tokens)), torch.where(known, tokens, 0)], NAN)


def check(logits: torch.Tensor, base: torch.Tensor, tokens: torch.Tensor) -> None:
    """Every column is right to TOLERANCE, NaN and infinities in their places, and so says features/signals.py."""
    found = signals(logits, base, tokens).cpu().double()
    x, y, ids = logits.cpu(), base.cpu(), tokens.cpu().long()
    torch.testing.assert_close(found, exact(x, y, ids), rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
    plain = torch.cat([reference.adapter_signals(x, ids), reference.probe_signals(x, y, ids)], dim=1)
    torch.testing.assert_close(found, plain.double(), rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


def draw(rows: int, vocabulary: int, dtype: torch.dtype, device: str, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Logits as a model gives them, the base's, which are near, and tokens."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, vocabulary, generator=generator) * 4
    y = x + torch.randn(rows, vocabulary, generator=generator) * torch.logspace(-3, 1, rows)[:, None]
    tokens = torch.randint(0, vocabulary, (rows,), generator=generator)
    return x.to(dtype).to(device), y.to(dtype).to(device), tokens.to(device)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_every_dtype_and_vocabulary(device: str, dtype: torch.dtype, vocabulary: int) -> None:
    """Every dtype is read as it is, and a vocabulary may end anywhere in a chunk."""
    check(*draw(5, vocabulary, dtype, device))


@settings(deadline=None, max_examples=EXAMPLES // 2)
@given(st.data())
def test_any_logits(device: str, data: st.DataObject) -> None:
    """Any logits, masked tokens and ties included, at any place of any chunk, in any dtype."""
    few = st.sampled_from([0.0, 1.0, 1.5, -INF])
    values = data.draw(st.sampled_from([few, st.floats(-20, 20, width=16) | st.just(-INF)]))
    rows, dtype = data.draw(st.integers(1, 3)), data.draw(st.sampled_from(DTYPES))
    pair = [torch.from_numpy(data.draw(arrays(np.float32, (rows, 12), elements=values))) for _ in range(2)]
    # The twelve drawn tokens lie in three chunks, before masked ones or ones of tiny probability.
    places = data.draw(st.lists(st.integers(0, 9000), min_size=12, max_size=12, unique=True))
    wide = [torch.full((rows, 9001), data.draw(st.sampled_from([-INF, -40.0]))) for _ in pair]
    for drawn, logits in zip(pair, wide, strict=True):
        logits[:, places] = drawn
    tokens = torch.tensor(data.draw(st.lists(st.sampled_from([*places, -1, 9001]), min_size=rows, max_size=rows)))
    x, y = (logits.to(dtype).to(device) for logits in wide)
    check(x, y, tokens.to(device))


@pytest.mark.parametrize("bad", [NAN, INF, -INF], ids=["nan", "inf", "all -inf"])
def test_a_row_without_a_distribution_is_missing(device: str, bad: float) -> None:
    """NaN or +inf anywhere, or nothing but -inf: all signals of that row are NaN, and no other row's bits change."""
    x, y, tokens = draw(3, 9001, torch.float32, device)
    alone = signals(x, y, tokens)
    for place in (slice(0, 1), slice(5000, 5001), slice(4096, 8192)):
        broken = x.clone()
        broken[1, slice(None) if bad == -INF else place] = bad
        for first, second, missing in ((broken, y, slice(None)), (y, broken, slice(4, None))):
            found = signals(first, second, tokens)
            assert found[1, missing].isnan().all()
            assert torch.equal(found[::2, missing], signals(y, x, tokens)[::2, 4:] if first is y else alone[::2])


def test_certainty_ties_and_huge_logits(device: str) -> None:
    """All mass on one token, first places shared within and across chunks, the ends of float32: as the reference."""
    x = torch.full((6, 9001), -INF)
    x[0, 8999] = 5.0
    x[1], x[1, [3, 4]] = 0.0, 9.0
    x[2], x[2, [3, 5000]] = 0.0, 9.0
    x[3], x[3, 5000] = -3e38, 3e38
    x[4] = 0.0
    x[5], x[5, :4096] = -3e38, -INF
    y, tokens = torch.zeros(6, 9001), torch.tensor([8999, 4, 5000, 5000, 1, 8000])
    y[2, 5000], y[4, 0] = 1.0, 1.0
    x, y, tokens = x.to(device), y.to(device), tokens.to(device)
    check(x, y, tokens)
    found = signals(x, y, tokens)
    assert found[0, :4].tolist() == [0.0, 1.0, 1.0, 0.0]
    assert not found[0, 0].signbit()
    assert found[[1, 2], 2].tolist() == [0.0, 0.0]
    assert found[:, 6].tolist() == [0.0, 0.0, 0.0, 0.0, 1.0, 0.0]


def test_equal_rows_do_not_differ(device: str) -> None:
    """A base equal to the adapter: KL and JS are zero but for rounding, never below, and the argmaxes agree."""
    x, _, tokens = draw(4, 9001, torch.bfloat16, device)
    found = signals(x, x, tokens)
    assert (found[:, 4:6] >= 0).all()
    assert (found[:, 4:6] <= 5e-6).all()
    assert (found[:, 6] == 1).all()
    torch.testing.assert_close(found[:, [3, 0]], found[:, 7:], rtol=1e-6, atol=1e-6)


def test_only_listed_rows_are_written(device: str) -> None:
    """Rows come in any order, -1 and numbers past the end are nobody, and a row that is not listed keeps its NaN."""
    x, y, tokens = draw(6, 4097, torch.float16, device)
    everything = signals(x, y, tokens)
    rows, base_rows = (torch.tensor(v, dtype=torch.int32, device=device) for v in ([4, -1, 0, 6, 3], [0, 2, -1, 1, 4]))
    found = signals(x, y[[4, 3, 0, 1, 3]], tokens.int(), rows=rows, base_rows=base_rows)
    assert torch.equal(found[[4, 3]], everything[[4, 3]])
    assert torch.equal(found[0, :4], everything[0, :4])
    assert found[0, 4:].isnan().all()
    assert found[[1, 2, 5]].isnan().all()
    nobody = torch.full((3,), -1, dtype=torch.int32, device=device)
    assert signals(x, y, tokens, rows=nobody).isnan().all()
    by_place = signals(x, y[[4, 0, 0]], tokens, rows=torch.tensor([4, -1, 0], dtype=torch.int32, device=device))
    assert torch.equal(by_place[[4, 0]], everything[[4, 0]])


@settings(deadline=None, max_examples=EXAMPLES // 4)
@given(st.permutations(range(5)), st.integers(1, 5), st.sampled_from(DTYPES[:2]))
def test_company_changes_no_bit(device: str, order: list[int], count: int, dtype: torch.dtype) -> None:
    """A row's bits do not depend on the other rows, on their number, or on its place."""
    x, y, tokens = draw(5, 4500, dtype, device)
    rows = order[:count]
    assert torch.equal(signals(x[rows], y[rows], tokens[rows]), signals(x, y, tokens)[rows])


def test_views_of_wider_logits(device: str) -> None:
    """Logits may be columns of a padded tensor, whose other columns are not read, and are left as they are."""
    x, y, tokens = draw(4, 4500, torch.float16, device)
    wide_x, wide_y = (torch.cat([t, torch.full((4, 61), NAN, dtype=t.dtype, device=device)], 1) for t in (x, y))
    assert torch.equal(signals(wide_x[:, :4500], wide_y[:, :4500], tokens), signals(x, y, tokens))
    assert torch.equal(wide_x[:, :4500], x)


def test_summary_may_come_first(device: str) -> None:
    """With the pass run earlier, only the chosen tokens' logits are read again; one tensor may hold both sides."""
    from lorazor.kernels.probe_signals import probe_signals
    from lorazor.kernels.signals import adapter_signals
    from lorazor.kernels.summaries import summarise

    x, y, tokens = draw(3, 9001, torch.float16, device)
    both, all_tokens = torch.cat([x, y]), torch.cat([tokens, tokens])
    summary = summarise(both, out=torch.full((6, 5, 3), NAN, device=device))
    spoilt = torch.full_like(both, NAN)
    spoilt[range(6), all_tokens] = both[range(6), all_tokens]
    expected = signals(x, y, tokens)
    assert torch.equal(adapter_signals(spoilt, all_tokens, summary=summary)[:3], expected[:, :4])
    rows, base_rows = (torch.arange(k, k + 3, dtype=torch.int32, device=device) for k in (0, 3))
    lists = {"rows": rows, "base_rows": base_rows, "summary": summary, "base_summary": summary}
    assert torch.equal(probe_signals(both, both, all_tokens, **lists)[:3], expected[:, 4:])


def test_no_rows(device: str) -> None:
    """An empty batch and an empty list launch nothing."""
    x, y, tokens = draw(2, 7, torch.float32, device)
    assert signals(x[:0], y[:0], tokens[:0]).shape == (0, 9)
    assert signals(x, y, tokens, rows=torch.empty(0, dtype=torch.int32, device=device)).isnan().all()


def test_misfits_are_refused(device: str) -> None:
    """A wrong dtype, shape, stride or list is an error that names what was found."""
    from lorazor.kernels.probe_signals import probe_signals
    from lorazor.kernels.signals import adapter_signals

    x, y, tokens = draw(3, 9, torch.float32, device)
    with pytest.raises(ValueError, match=r"are torch\.float64"):
        adapter_signals(x.double(), tokens)
    with pytest.raises(ValueError, match="must be dense"):
        adapter_signals(x[:, ::2], tokens)
    with pytest.raises(ValueError, match=r"int64 \[3\], are torch\.int64 \(2,\)"):
        adapter_signals(x, tokens[:2])
    with pytest.raises(ValueError, match=r"int32 \[k\], are torch\.int64"):
        adapter_signals(x, tokens, rows=tokens)
    with pytest.raises(ValueError, match=r"float32 \(3, 4\), is torch\.float32 \(3, 5\)"):
        adapter_signals(x, tokens, out=torch.empty(3, 5, device=device))
    with pytest.raises(ValueError, match="found 9 and 8 tokens"):
        probe_signals(x, y[:, :8], tokens)
    with pytest.raises(ValueError, match=r"3 pairs need as many of the base's rows, found 2"):
        probe_signals(x, y[:2], tokens)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_servers_shape_on_the_gpu() -> None:
    """128 rows x 128,256 tokens in bfloat16: right, and the same bits on every repeat, alone and in a CUDA graph."""
    x, y, tokens = draw(128, 128_256, torch.bfloat16, "cuda")
    first = signals(x, y, tokens)
    expected = exact(x.cpu(), y.cpu(), tokens.cpu())
    torch.testing.assert_close(first.cpu().double(), expected, rtol=TOLERANCE, atol=TOLERANCE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = signals(x, y, tokens)
    for _ in range(100):
        captured.fill_(NAN)
        graph.replay()
        assert torch.equal(captured, first)
        assert torch.equal(signals(x, y, tokens), first)
    assert torch.equal(signals(x[40:41], y[40:41], tokens[40:41]), first[40:41])
