"""Exact replay: what any release policy would have done to recorded requests, by look-up and without a model.

A `ReplayTable` holds one task. Everything a policy can do is to pick, per request, one of its decisions or none; an
`Outcome` is what follows from that pick, and a `Summary` the numbers of it as design.md words them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from lorazor.features.errors import InputError
from lorazor.training.traces import TraceSet

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
NEVER = -1
"""In place of a decision's index: this request never releases."""


@dataclass(frozen=True)
class LeftOut:
    """Rollouts of the release grid that a policy cannot pick: `differs` by numerics, `missing` never recorded."""

    differs: int = 0
    missing: int = 0


@dataclass(frozen=True, eq=False)
class ReplayTable:
    """One task's requests (n of them) and their decisions (D, grouped by request, ascending step).

    A decision whose rollout is left out is no row here, so that no policy can pick it.
    """

    task: str
    probe_interval: int
    request_id: npt.NDArray[np.object_]  # [n] str
    score: Floats  # [n] S
    base_score: Floats  # [n]
    length: Ints  # [n] L
    base_tokens: Ints  # [n] output length without any adapter
    max_tokens: Ints  # [n]
    first: Ints  # [n + 1]: decisions of request i are first[i]:first[i + 1]
    step: Ints  # [D] decision step c, 0 = admission
    features: npt.NDArray[np.float32]  # [D, F]
    released_score: Floats  # [D] R
    released_tokens: Ints  # [D] output length
    same_text: Bools  # [D] released text = never-released text
    left_out: LeftOut = LeftOut()

    @classmethod
    def from_traces(cls, traces: TraceSet, task: str, mean_output_tokens: float) -> ReplayTable:
        """The table of `task`; `mean_output_tokens` is the task's constant of the artifact (NaN = unknown)."""
        from lorazor.training.replay_build import build

        return build(traces, task, mean_output_tokens)

    def __len__(self) -> int:
        return len(self.score)

    @cached_property
    def request(self) -> Ints:
        """[D] the index of the request that each decision belongs to."""
        return np.repeat(np.arange(len(self), dtype=np.int64), np.diff(self.first))

    @cached_property
    def release(self) -> Ints:
        """[D] the release step r that each decision gives."""
        return np.where(self.step == 0, 1, self.step + 2)

    @cached_property
    def solved(self) -> Bools:
        """[n] S > 0: the requests by which a policy is judged."""
        return self.score > 0

    def subset(self, keep: Bools) -> ReplayTable:
        """Only the requests where `keep` ([n] bool) holds."""
        rows = keep[self.request]
        first = np.concatenate([[0], np.cumsum(np.diff(self.first)[keep])]).astype(np.int64)
        return ReplayTable(
            self.task, self.probe_interval, self.request_id[keep], self.score[keep], self.base_score[keep],
            self.length[keep], self.base_tokens[keep], self.max_tokens[keep], first, self.step[rows],
            self.features[rows], self.released_score[rows], self.released_tokens[rows], self.same_text[rows],
            self.left_out,
        )  # fmt: skip

    def first_decision(self, scores: Floats, threshold: float | None) -> Ints:
        """[n] the index of each request's first decision with a score ([D]) >= threshold, or NEVER.

        A NaN score never releases, and no threshold means never.
        """
        chosen = np.full(len(self), NEVER, dtype=np.int64)
        if threshold is None:
            return chosen
        hits = np.flatnonzero(scores >= threshold)[::-1]
        # Of equal indices NumPy keeps the last assignment: reversed, that is a request's first hit.
        chosen[self.request[hits]] = hits
        return chosen

    def outcome(self, decision: Ints) -> Outcome:
        """What becomes of every request when request i releases at decision `decision[i]` (or NEVER)."""
        released = decision != NEVER
        release, score, tokens = self.length.copy(), self.score.copy(), self.length.copy()
        at = decision[released]
        release[released] = self.release[at]
        score[released] = self.released_score[at]
        tokens[released] = self.released_tokens[at]
        return Outcome(release, score, tokens, released)

    def base_only(self) -> Outcome:
        """The outcome with no adapter at all, not even for the prompt; its active-row share is 0."""
        n = len(self)
        return Outcome(np.ones(n, np.int64), self.base_score, self.base_tokens, np.ones(n, np.bool_))


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a policy did: per request the release step (L where it never released), score and output length."""

    release: Ints
    score: Floats
    tokens: Ints
    released: Bools


@dataclass(frozen=True)
class Summary:
    """The numbers of one outcome over `n` requests; null (None) where design.md says that a number means nothing."""

    n: int
    q_base: float
    q_adapter: float
    q_policy: float
    drop: float | None
    retention: float | None
    active_row_share: float
    length_ratio: float
    released: float

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self)


def active_row_share(table: ReplayTable, outcome: Outcome, keep: Bools | slice = slice(None)) -> float:
    """Sum of (r - 1) over sum of (L - 1); 1 when there is no decode step to save."""
    steps = int((table.length[keep] - 1).sum())
    return float((outcome.release[keep] - 1).sum() / steps) if steps else 1.0


def drop(table: ReplayTable, outcome: Outcome, keep: Bools | slice = slice(None)) -> float | None:
    """1 - mean R / mean S, None when mean S = 0."""
    total = table.score[keep].sum()
    return float(1 - outcome.score[keep].sum() / total) if total > 0 else None


def length_ratio(table: ReplayTable, outcome: Outcome, keep: Bools | slice = slice(None)) -> float:
    """Released over never-released output length, summed over the requests; 1 when there are none."""
    total = int(table.length[keep].sum())
    return float(outcome.tokens[keep].sum() / total) if total else 1.0


def adapter_gain(table: ReplayTable, keep: Bools | slice = slice(None)) -> float | None:
    """Q_adapter - Q_base, None when it is under twice its standard error (of the paired differences) or n < 2."""
    difference = table.score[keep] - table.base_score[keep]
    if len(difference) < 2:
        return None
    gain, error = difference.mean(), difference.std(ddof=1) / np.sqrt(len(difference))
    return float(gain) if gain > 0 and gain >= 2 * error else None


def summarize(table: ReplayTable, outcome: Outcome, *, solved_only: bool = False) -> Summary:
    """All numbers of an outcome, over all requests or over those with S > 0; InputError without any request."""
    keep: Bools | slice = table.solved if solved_only else slice(None)
    score = table.score[keep]
    if not len(score):
        raise InputError(
            f"task {table.task!r} has no request{' with a score above 0' if solved_only else ''} to replay"
        )
    q_base, q_policy = float(table.base_score[keep].mean()), float(outcome.score[keep].mean())
    gain = adapter_gain(table, keep)
    return Summary(
        n=len(score),
        q_base=q_base,
        q_adapter=float(score.mean()),
        q_policy=q_policy,
        drop=drop(table, outcome, keep),
        retention=None if gain is None else (q_policy - q_base) / gain,
        active_row_share=active_row_share(table, outcome, keep),
        length_ratio=length_ratio(table, outcome, keep),
        released=float(outcome.released[keep].mean()),
    )


@dataclass(frozen=True, eq=False)
class Curve:
    """What each threshold of a sweep gives; one entry per threshold, NaN where a number is null."""

    threshold: Floats
    share: Floats
    drop: Floats
    retention: Floats
    length_ratio: Floats


def sweep(
    table: ReplayTable, scores: Floats, thresholds: Sequence[float] | Floats, *, solved_only: bool = False
) -> Curve:
    """Replay `scores` ([D]) at every threshold."""
    keep: Bools | slice = table.solved if solved_only else slice(None)
    gain, base = adapter_gain(table, keep), table.base_score[keep].sum()
    n = int(table.solved.sum()) if solved_only else len(table)
    rows = []
    for threshold in thresholds:
        outcome = table.outcome(table.first_decision(scores, float(threshold)))
        lost = drop(table, outcome, keep)
        kept = np.nan if gain is None else (outcome.score[keep].sum() - base) / (n * gain)
        share, ratio = active_row_share(table, outcome, keep), length_ratio(table, outcome, keep)
        rows.append((threshold, share, np.nan if lost is None else lost, kept, ratio))
    return Curve(*np.asarray(rows, dtype=np.float64).reshape(-1, 5).T)
