"""What one arm of the end-to-end stage gave, as numbers of a row, beside replay by look-up on the same requests.

All frames are indexed by request id. `release` is the release step, NaN where the adapter stayed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from lorazor.training.replay import Outcome, ReplayTable
from lorazor.training.traces import Noise

QUANTILES = {"p50": 0.5, "p99": 0.99}
SHOWN = (
    *("backbone", "task", "adapter", "arm", "requests", "mean_score", "drop", "active_row_share", "length_ratio"),
    *("requests_per_s", "tokens_per_s", "ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "tpot_ms_p99", "same_release"),
    *("same_score", "mean_difference", "mean_abs_difference", "noise_mean_abs_difference", "noise_differing"),
)


def live_frame(ids: Sequence[str], found: Mapping[str, Any], scores: Sequence[float]) -> pd.DataFrame:
    """One arm's answers: score, tokens, release, and in ms the time to the first token and that of each later one.

    Args:
        ids: of the requests, in the order in which they were sent.
        found: what `Server.run` gave; its times are seconds.
        scores: of the answers, in the same order.
    """
    tokens = np.asarray(found["output_lens"], dtype=np.int64)
    # An answer of one token has no later one.
    decoding = [sum(times) / (n - 1) if n > 1 else np.nan for times, n in zip(found["itls"], tokens, strict=True)]
    columns = {
        "score": np.asarray(scores, dtype=np.float32).astype(np.float64),  # the precision of the traces
        "tokens": tokens,
        "release": np.array(found["release_steps"], dtype=np.float64),
        "ttft_ms": 1000 * np.asarray(found["ttfts"], dtype=np.float64),
        "tpot_ms": 1000 * np.array(decoding, dtype=np.float64),
    }
    return pd.DataFrame(columns, index=list(ids))


def replay_frame(table: ReplayTable, outcome: Outcome) -> pd.DataFrame:
    """What replay says of every request: score, tokens, release."""
    release = np.where(outcome.released, outcome.release, np.nan)
    columns = {"score": outcome.score, "tokens": outcome.tokens, "release": release}
    return pd.DataFrame(columns, index=list(table.request_id))


def numbers(live: pd.DataFrame, never: pd.DataFrame) -> dict[str, Any]:
    """Quality and saving of one arm against never released on the same server, and its latencies."""
    never = never.loc[live.index]
    steps, length = int((never["tokens"] - 1).sum()), int(never["tokens"].sum())
    held = live["release"].fillna(never["tokens"].astype(np.float64)) - 1
    lost = 1 - live["score"].mean() / never["score"].mean() if never["score"].any() else None
    latencies = {
        f"{name}_{label}": live[name].quantile(q) for name in ("ttft_ms", "tpot_ms") for label, q in QUANTILES.items()
    }
    return {
        **{"requests": len(live), "mean_score": live["score"].mean(), "drop": lost},
        "active_row_share": held.sum() / steps if steps else 1.0,
        "length_ratio": live["tokens"].sum() / length,
        **latencies,
    }


def against_replay(live: pd.DataFrame, replay: pd.DataFrame) -> dict[str, float]:
    """Shares of requests with the very release step and score that replay gives, and by how much scores differ."""
    replay = replay.loc[live.index]
    both_stay = live["release"].isna() & replay["release"].isna()
    difference = live["score"] - replay["score"]
    return {
        "same_release": float(((live["release"] == replay["release"]) | both_stay).mean()),
        "same_score": float((difference == 0).mean()),
        "mean_difference": float(difference.mean()),
        "mean_abs_difference": float(difference.abs().mean()),
    }


def noise_of(measured: Mapping[str, Noise], tasks: Sequence[str]) -> dict[str, float]:
    """Never against never, as the collections measured it, over requests of these tasks (one entry per request).

    Empty where it was not measured for one of them.
    """
    if not set(tasks) <= set(measured):
        return {}
    found = [measured[task] for task in tasks]
    return {
        "noise_mean_abs_difference": float(np.mean([noise.mean_abs_diff for noise in found])),
        "noise_differing": float(np.mean([noise.differing / max(1, noise.n) for noise in found])),
    }


def e2e_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Per kind, task (or all of them) and arm: quality, speed, and the comparison with replay."""
    return rows.reindex(columns=list(SHOWN))
