"""One decode step of every request's window: `features/window.py` in one launch, to the last bit.

    for row in rows of the batch:
        if owners[place] == serial: s, fits = state[place], steps(s) == c
        else:                       s, fits = start, c == 0
        if fits:
            state[place] = s = advance(s, signals[row], probes[row])
            features[row] = features_of(s)
            due[row] = row if any probe is known (with an interval: if c is a decision step) else -1

A place belongs to the request whose serial number pushed last, so nobody resets it; and a step that does not follow the
last one, because it was made already or one is missing, is left out whole. Eager calls would be a hundred launches.

The bits are those of `features.Window`, which only adds, subtracts, multiplies, compares and divides: divisions here
are rounded as IEEE 754 says, and fused multiply-add is off. The definitions are there, this file only repeats them.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# (Triton's device code is not typed Python.)

from __future__ import annotations

import torch
import triton
import triton.language as tl

STATE, FEATURES = 26, 35
ROWS = 32  # of one program, a thread each

# Columns of the state; fast and slow averages come first.
LOGPROB_SUM, LOGPROB_COUNT, ENTROPY_MAX, MARGIN_MIN = (tl.constexpr(i) for i in range(8, 12))
PROBE, GAP, KL_SUM, KL_COUNT, KL_SLOPE = (tl.constexpr(i) for i in (12, 17, 18, 19, 20))
STREAK, AGREE_SUM, AGREE_COUNT, SINCE, STEPS = (tl.constexpr(i) for i in range(21, 26))


@triton.jit
def _known(x):
    """NaN in place of what is not finite."""
    return tl.where(tl.abs(x) < float("inf"), x, float("nan"))


@triton.jit
def _average(average, x, rate):
    """Starts at the first value and waits while the value is missing."""
    moved = tl.where(average == average, average + (x - average) * rate, x)
    return tl.where(x == x, moved, average)


@triton.jit
def _add(total, x):
    return tl.where(x == x, total + x, total)


@triton.jit
def _count(count, x):
    return count + tl.where(x == x, 1.0, 0.0)


@triton.jit
def _limit(old, x, replace):
    """`x` where it replaces the extreme so far, or is the first that is known."""
    return tl.where((x == x) & (replace | (old != old)), x, old)


@triton.jit
def _put(p_features, i, x, mask):
    tl.store(p_features + i, _known(x), mask=mask)


@triton.jit
def _push_signals(p_state, p_features, p_signals, begun, fits):
    """Averages, extremes and the mean log-probability; returns the log-probability."""
    for i in tl.static_range(4):
        x = _known(tl.load(p_signals + i, mask=fits, other=float("nan")))
        fast = _average(tl.load(p_state + i, mask=begun, other=float("nan")), x, 0.25)
        slow = _average(tl.load(p_state + 4 + i, mask=begun, other=float("nan")), x, 0.0625)
        tl.store(p_state + i, fast, mask=fits)
        tl.store(p_state + 4 + i, slow, mask=fits)
        _put(p_features, i, x, fits)
        _put(p_features, 4 + i, fast, fits)
        _put(p_features, 8 + i, slow, fits)
        _put(p_features, 12 + i, fast - slow, fits)
    entropy = _known(tl.load(p_signals, mask=fits, other=float("nan")))
    margin = _known(tl.load(p_signals + 2, mask=fits, other=float("nan")))
    logprob = _known(tl.load(p_signals + 3, mask=fits, other=float("nan")))
    total = _add(tl.load(p_state + LOGPROB_SUM, mask=begun, other=0.0), logprob)
    count = _count(tl.load(p_state + LOGPROB_COUNT, mask=begun, other=0.0), logprob)
    most = tl.load(p_state + ENTROPY_MAX, mask=begun, other=float("nan"))
    most = _limit(most, entropy, entropy > most)
    least = tl.load(p_state + MARGIN_MIN, mask=begun, other=float("nan"))
    least = _limit(least, margin, margin < least)
    tl.store(p_state + LOGPROB_SUM, total, mask=fits)
    tl.store(p_state + LOGPROB_COUNT, count, mask=fits)
    tl.store(p_state + ENTROPY_MAX, most, mask=fits)
    tl.store(p_state + MARGIN_MIN, least, mask=fits)
    _put(p_features, 16, tl.math.div_rn(total, count), fits)
    _put(p_features, 17, most, fits)
    _put(p_features, 18, least, fits)
    return logprob


@triton.jit
def _push_probes(p_state, p_features, p_probes, logprob, begun, fits):
    """What the last probe said, and the probes' means and streaks; returns whether this step was probed."""
    first = tl.load(p_probes, mask=fits, other=float("nan"))
    probed = first == first
    for i in tl.static_range(1, 5):
        y = tl.load(p_probes + i, mask=fits, other=float("nan"))
        probed = probed | (y == y)
    kl = _known(first)
    agrees = _known(tl.load(p_probes + 2, mask=fits, other=float("nan")))
    base_logprob = _known(tl.load(p_probes + 3, mask=fits, other=float("nan")))
    slope = tl.load(p_state + KL_SLOPE, mask=begun, other=float("nan"))
    slope = tl.where(probed, kl - tl.load(p_state + PROBE, mask=begun, other=float("nan")), slope)
    for i in tl.static_range(5):
        y = tl.load(p_state + PROBE + i, mask=begun, other=float("nan"))
        y = tl.where(probed, _known(tl.load(p_probes + i, mask=fits, other=float("nan"))), y)
        tl.store(p_state + PROBE + i, y, mask=fits)
        _put(p_features, 19 + i, y, fits)
    gap = tl.where(probed, logprob - base_logprob, tl.load(p_state + GAP, mask=begun, other=float("nan")))
    kl_sum = _add(tl.load(p_state + KL_SUM, mask=begun, other=0.0), kl)
    kl_count = _count(tl.load(p_state + KL_COUNT, mask=begun, other=0.0), kl)
    streak = tl.load(p_state + STREAK, mask=begun, other=0.0)
    streak = tl.where(agrees == agrees, (streak + 1.0) * agrees, streak)
    agree_sum = _add(tl.load(p_state + AGREE_SUM, mask=begun, other=0.0), agrees)
    agree_count = _count(tl.load(p_state + AGREE_COUNT, mask=begun, other=0.0), agrees)
    since = tl.where(probed, 0.0, tl.load(p_state + SINCE, mask=begun, other=float("nan")) + 1.0)
    tl.store(p_state + GAP, gap, mask=fits)
    tl.store(p_state + KL_SUM, kl_sum, mask=fits)
    tl.store(p_state + KL_COUNT, kl_count, mask=fits)
    tl.store(p_state + KL_SLOPE, slope, mask=fits)
    tl.store(p_state + STREAK, streak, mask=fits)
    tl.store(p_state + AGREE_SUM, agree_sum, mask=fits)
    tl.store(p_state + AGREE_COUNT, agree_count, mask=fits)
    tl.store(p_state + SINCE, since, mask=fits)
    _put(p_features, 24, gap, fits)
    _put(p_features, 25, tl.math.div_rn(kl_sum, kl_count), fits)
    _put(p_features, 26, slope, fits)
    _put(p_features, 27, tl.where(agree_count > 0.0, streak, float("nan")), fits)
    _put(p_features, 28, tl.math.div_rn(agree_sum, agree_count), fits)
    _put(p_features, 29, since, fits)
    return probed


@triton.jit(do_not_specialize=["n_rows"])
def _window_kernel(
    state_ptr,
    owners_ptr,
    signals_ptr,
    probes_ptr,
    places_ptr,
    serials_ptr,
    steps_ptr,
    requests_ptr,
    features_ptr,
    due_ptr,
    n_rows,
    stride,
    STATE: tl.constexpr,
    FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
    INTERVAL: tl.constexpr,
):
    """ROWS rows of the batch, each one on its own."""
    o_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    listed = o_row < n_rows
    place = tl.load(places_ptr + o_row, mask=listed, other=-1)
    serial = tl.load(serials_ptr + o_row, mask=listed, other=-1)
    c = tl.load(steps_ptr + o_row, mask=listed, other=-1)
    held = place >= 0
    p_state = state_ptr + place.to(tl.int64) * STATE
    mine = held & (tl.load(owners_ptr + place, mask=held, other=-1) == serial)
    steps = tl.load(p_state + STEPS, mask=mine, other=0.0)
    fits = held & (steps == c.to(tl.float32))
    begun = mine & fits
    p_features = features_ptr + o_row.to(tl.int64) * FEATURES
    logprob = _push_signals(p_state, p_features, signals_ptr + o_row * 4, begun, fits)
    probed = _push_probes(p_state, p_features, probes_ptr + o_row * 5, logprob, begun, fits)
    prompt_tokens = tl.load(requests_ptr + o_row, mask=listed, other=float("nan"))
    max_tokens = tl.load(requests_ptr + stride + o_row, mask=listed, other=float("nan"))
    mean_tokens = tl.load(requests_ptr + 2 * stride + o_row, mask=listed, other=float("nan"))
    _put(p_features, 30, prompt_tokens, fits)
    _put(p_features, 31, max_tokens, fits)
    _put(p_features, 32, steps, fits)
    _put(p_features, 33, tl.math.div_rn(steps, max_tokens), fits)
    _put(p_features, 34, tl.math.div_rn(steps, mean_tokens), fits)
    tl.store(p_state + STEPS, steps + 1.0, mask=fits)
    tl.store(owners_ptr + place, serial, mask=fits)
    is_due = probed
    if INTERVAL > 0:
        is_due = fits & ((c == 1) | ((c > 0) & (c % INTERVAL == 0)))
    tl.store(due_ptr + o_row, tl.where(is_due, o_row, -1), mask=listed)


def push(
    state: torch.Tensor,
    owners: torch.Tensor,
    signals: torch.Tensor,
    probes: torch.Tensor,
    places: torch.Tensor,
    serials: torch.Tensor,
    steps: torch.Tensor,
    requests: torch.Tensor,
    *,
    interval: int | None = None,
    features: torch.Tensor | None = None,
    due: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take in one step of a batch.

    Args:
        state: float32 [capacity, STATE], and owners: int32 [capacity], -1 at first; both are written.
        signals: float32 [n, 4]. probes: float32 [n, 5], all NaN where not probed.
        places: int32 [n], the row's place in the state, each place once; -1: nobody's, left out.
        serials: int32 [n], not negative, which request it is. steps: int32 [n], c, the output tokens before this step.
        requests: float32 [3, n], the last dimension dense: prompt_tokens, max_tokens, mean_output_tokens.
        interval: g of a policy without probes.
        features, due: memory for the results, dense.

    Returns:
        features: float32 [n, FEATURES] in the order of `features.schema`; not written in rows that were left out.
        due: int32 [n], the row itself where it was taken in and was probed or, with an interval, is at one of its
            decision steps (features.grid); else -1.
    """
    n = len(signals)
    if features is None:
        features = torch.empty((n, FEATURES), dtype=torch.float32, device=state.device)
    if due is None:
        due = torch.empty(n, dtype=torch.int32, device=state.device)
    if n:
        _window_kernel[(triton.cdiv(n, ROWS),)](
            state_ptr=state,
            owners_ptr=owners,
            signals_ptr=signals,
            probes_ptr=probes,
            places_ptr=places,
            serials_ptr=serials,
            steps_ptr=steps,
            requests_ptr=requests,
            features_ptr=features,
            due_ptr=due,
            n_rows=n,
            stride=requests.stride(0),
            STATE=STATE,
            FEATURES=FEATURES,
            ROWS=ROWS,
            INTERVAL=interval or 0,
            num_warps=1,
            enable_fp_fusion=False,
        )
    return features, due
