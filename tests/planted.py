"""Planted data: requests whose truth we set, so that what a policy or a guarantee should find is known.

`planted_traces` makes whole trace tables. In a "hidden" task each request has its own change point: from that decode
step on, KL is low and the base agrees, and a release is safe; before it, the request is harmed. A few requests, known
by their long prompt, are safe from admission on, and a few never are. In an "unsafe" task no release is ever safe,
whatever the signals say. `Population` skips the tables: scores and outcomes at given thresholds, for 10^5 requests at
once.
"""

import hashlib
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from lorazor.features.grid import release_grid
from lorazor.training.trace_checks import checked
from lorazor.training.traces import AdapterInfo, Meta, ModelInfo, TaskInfo, TraceSet

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
MAX_TOKENS = 96
LONG_PROMPT = 200
"""Prompts of at least this many tokens are those that are safe from admission on ("hidden" tasks only)."""


def fingerprint_of(name: str) -> str:
    """A stand-in for the fingerprint of weights: the sha256 of the name."""
    return hashlib.sha256(name.encode()).hexdigest()


def planted_meta(tasks: list[str], probe_interval: int = 8, greedy: bool = True) -> Meta:
    """A meta.json for planted tasks, each with an adapter `<task>-lora`; fingerprints are hashes of the names."""
    return Meta(
        base=ModelInfo(name="planted-base", fingerprint=fingerprint_of("planted-base")),
        adapters=[AdapterInfo(name=f"{t}-lora", fingerprint=fingerprint_of(f"{t}-lora"), task=t) for t in tasks],
        probe_interval=probe_interval,
        tasks={t: TaskInfo(max_tokens=MAX_TOKENS, scorer="exact") for t in tasks},
        command="planted",
        greedy=greedy,
    )


def planted_traces(
    n: int,
    seed: int,
    *,
    task: str = "sql",
    kind: Literal["hidden", "unsafe"] = "hidden",
    quality: float = 0.6,
    noise: float = 0.3,
    probe_interval: int = 8,
    graded: bool = False,
    greedy: bool = True,
) -> TraceSet:
    """Traces of `n` requests of one task, about 40 steps each, already checked; ids hold task and seed.

    Args:
        kind: "hidden" or "unsafe" (see the module's text).
        quality: the share of requests with S > 0 (S = 1, or in [0.5, 1] when `graded`).
        noise: standard deviation of log KL, which drops by 4 at the change point: 0.3 hides nothing, 2 a good deal.
        greedy: false makes S and a safe R independent draws of the same chance.
    """
    rng = np.random.default_rng([seed, *task.encode()])
    length = rng.integers(18, 63, n)
    long = (rng.random(n) < 0.1) & (kind == "hidden")
    change = np.where(long, 0, rng.integers(1, np.maximum(2, (0.7 * length).astype(np.int64))))
    change = np.where((rng.random(n) < 0.15) & ~long, length, change)
    ids = np.array([f"{task}-{seed}-{i}" for i in range(n)], dtype=object)
    prompt = np.where(long, rng.integers(LONG_PROMPT, LONG_PROMPT + 60, n), rng.integers(20, 150, n))
    never = np.where(rng.random(n) < quality, rng.uniform(0.5, 1, n) if graded else 1.0, 0.0).astype(np.float64)
    steps = _steps(rng, task, ids, prompt, length, change, noise, probe_interval)
    rollouts = _rollouts(rng, task, ids, length, change, never, kind, quality, probe_interval, greedy)
    return checked(steps, rollouts, planted_meta([task], probe_interval, greedy))


def joined(*sets: TraceSet) -> TraceSet:
    """Trace sets of different tasks as one; g, base and greediness are those of the first."""
    first = sets[0].meta
    tasks = list(dict.fromkeys(t for s in sets for t in s.meta.tasks))
    steps, rollouts = (pd.concat([getattr(s, k) for s in sets], ignore_index=True) for k in ("steps", "rollouts"))
    return checked(steps, rollouts, planted_meta(tasks, first.probe_interval, first.greedy))


def _steps(
    rng: np.random.Generator,
    task: str,
    ids: npt.NDArray[np.object_],
    prompt: Ints,
    length: Ints,
    change: Ints,
    noise: float,
    g: int,
) -> pd.DataFrame:
    request = np.repeat(np.arange(len(ids)), length)
    step = np.arange(len(request)) - np.repeat(np.cumsum(length) - length, length)
    after = step >= change[request]
    probed = (step == 1) | ((step > 0) & (step % g == 0))
    kl = np.exp(np.where(after, -4.0, 0.0) + noise * rng.standard_normal(len(step)))
    agrees = rng.random(len(step)) < np.where(after, 0.97, 0.4)
    top1 = rng.uniform(0.5, 1, len(step))

    def column(values: Floats, only_probed: bool = False) -> npt.NDArray[np.float32]:
        return np.where(probed | (not only_probed), values, np.nan).astype(np.float32)

    return pd.DataFrame(
        {
            "request_id": ids[request],
            "task": task,
            "adapter": f"{task}-lora",
            "step": step.astype(np.int32),
            "token_id": rng.integers(0, 1000, len(step)).astype(np.int32),
            "prompt_tokens": prompt[request].astype(np.int32),
            "max_tokens": np.int32(MAX_TOKENS),
            "entropy": column(2 * (1 - top1) + 0.1 * rng.random(len(step))),
            "top1_prob": column(top1),
            "margin": column(2 * top1 - 1),
            "token_logprob": column(np.log(top1)),
            "probed": probed,
            "kl": column(kl, True),
            "js": column(0.69 * kl / (1 + kl), True),
            "base_top1_agrees": column(agrees.astype(np.float64), True),
            "base_token_logprob": column(np.log(top1) - kl, True),
            "base_entropy": column(1 + kl / (1 + kl), True),
        }
    )


def _rollouts(
    rng: np.random.Generator,
    task: str,
    ids: npt.NDArray[np.object_],
    length: Ints,
    change: Ints,
    never: Floats,
    kind: str,
    quality: float,
    g: int,
    greedy: bool,
) -> pd.DataFrame:
    """Never, base, and every step of the release grid, which is safe when its decision c >= the change point."""
    grids = {n: release_grid(int(n), g) for n in np.unique(length)}
    release = np.array([r for n in length for r in grids[n]], dtype=np.int64)
    request = np.repeat(np.arange(len(ids)), [len(grids[n]) for n in length])
    decided = np.where(release == 1, 0, release - 2)
    safe = (decided >= change[request]) & (kind == "hidden")
    score = np.where(safe, never[request] if greedy else rng.random(len(safe)) < quality, 0.0)
    base = np.where((change == 0) & (kind == "hidden"), never, 0.0)
    n, released = len(ids), len(release)
    tokens = np.where(safe, length[request], np.minimum(MAX_TOKENS, length[request] + rng.integers(0, 9, released)))
    every = np.concatenate([np.arange(n), np.arange(n), request])
    step = np.concatenate([np.zeros(2 * n, np.int64), release])
    return pd.DataFrame(
        {
            "request_id": ids[every],
            "task": task,
            "adapter": f"{task}-lora",
            "mode": np.repeat(np.array(["adapter", "base", "released"], dtype=object), [n, n, released]),
            "release_step": pd.array(step, dtype="Int32"),
            "score": np.concatenate([never, base, score]).astype(np.float32),
            "output_tokens": np.concatenate([length, length, tokens]).astype(np.int32),
            "finish_reason": "stop",
            "same_text": np.concatenate([np.ones(n, bool), change == 0, safe]),
            "differs": False,
        }
    ).assign(release_step=lambda f: f["release_step"].where(f["mode"] == "released"))


@dataclass(frozen=True)
class Population:
    """Requests as scores and outcomes alone, for Monte-Carlo: `decisions` decisions each, and a score that is `gap`
    standard deviations higher where releasing is safe. `thresholds` are on that scale, strictest first.
    """

    thresholds: tuple[float, ...] = tuple(np.linspace(4.0, 0.5, 20))
    decisions: int = 6
    gap: float = 2.5
    quality: float = 0.6
    graded: bool = False
    greedy: bool = True
    safe: bool = True

    def draw(self, n: int, seed: int) -> tuple[Floats, Floats, Floats]:
        """S [n], R [n, k] and the active share [n, k] of n fresh requests at each of the k thresholds."""
        rng = np.random.default_rng(seed)
        change = rng.integers(0, self.decisions + 1, n) if self.safe else np.full(n, self.decisions)
        at = np.arange(self.decisions)
        ok = at >= change[:, None]
        scores = rng.standard_normal((n, self.decisions)) + self.gap * ok
        worth = rng.uniform(0.5, 1, n) if self.graded else np.ones(n)
        never = (rng.random(n) < self.quality) * worth
        # What a safe release gives: the same score, or another draw when sampling; an unsafe one loses most of it.
        kept = never if self.greedy else (rng.random(n) < self.quality) * worth
        lost = kept * rng.uniform(0, 0.8, n) if self.graded else kept * (rng.random(n) < 0.2)
        released, share = np.empty((n, len(self.thresholds))), np.empty((n, len(self.thresholds)))
        for k, threshold in enumerate(self.thresholds):
            hit = scores >= threshold
            first, any_hit = hit.argmax(axis=1), hit.any(axis=1)
            outcome = np.where(ok[np.arange(n), first], kept, lost)
            released[:, k] = np.where(any_hit, outcome, never)
            share[:, k] = np.where(any_hit, first / self.decisions, 1.0)
        return never, released, share
