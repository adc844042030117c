"""Stage `policies`: every policy of `lorazor train` trained, tuned alike and judged on the test requests.

A threshold is chosen by Learn then Test from the policy's own grid on the calibration requests, whatever the policy;
`never`, `base only` and `prompt only` have none, and the oracle's is hindsight. CPU only: all of it is look-ups.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from lorazor.features.errors import InputError
from lorazor.training.baselines import ORACLE
from lorazor.training.calibration import Scored
from lorazor.training.compare import BASE_ONLY, NEVER_RELEASED
from lorazor.training.learned import LEARNED, fit_lightgbm
from lorazor.training.losses import Kind
from lorazor.training.replay import Floats, Outcome, ReplayTable
from lorazor.training.save import save
from lorazor.training.study.bands import band_rows, since_rows
from lorazor.training.study.cells import Parts, Rated, load_parts, rate
from lorazor.training.study.layout import CALIBRATE, POLICY_TRAIN, TEST, Cell, Layout
from lorazor.training.study.numbers import SCOPES, above, numbers, prompt_only
from lorazor.training.study.results import Results
from lorazor.training.traces import Noise
from lorazor.training.train import fit
from lorazor.training.tune import learn_then_test
from lorazor.training.tune_checks import noise_floor

PROMPT_ONLY, RANDOM = "prompt only", "random"
Row = dict[str, Any]


@dataclass(frozen=True)
class Promise:
    """What thresholds are tuned to: each kind of loss (losses.py) and each max-drop, at one confidence."""

    max_drops: Sequence[float] = (0.01, 0.03, 0.05)
    confidence: float = 0.9
    kinds: Sequence[Kind] = ("relative", "net")

    @property
    def limits(self) -> list[tuple[Kind, float]]:
        """Every loss kind with every max-drop."""
        return list(product(self.kinds, self.max_drops))


def policies(
    layout: Layout, cells: Iterable[Cell], promise: Promise, *, seed: int, progress: Callable[[str], None]
) -> None:
    """Add every cell to policies.csv, bands.csv and since.csv, and its learnt policy to policies/."""
    table, bands, since = (Results(layout.csv(name)) for name in ("policies", "bands", "since"))
    for cell in cells:
        if table.has(cell.row()):
            continue
        progress(f"policies: {cell}")
        parts = load_parts(layout, cell, seed)
        rated, note = trained(parts, layout)
        for extra, rows in ((bands, band_rows(rated, seed)), (since, ended_by_base(parts, rated, promise))):
            if rated and not extra.has(cell.row()):
                extra.add({**cell.row(), **row} for row in rows)
        table.add({**cell.row(), **row, "note": note} for row in judged(parts, rated, promise))


def trained(parts: Parts, layout: Layout) -> tuple[list[Rated], str]:
    """All policies with their scores, the learnt one saved; none, and why, where there is nothing to learn."""
    try:
        found = fit(parts.data, seed=parts.seed)
    except InputError as error:
        return [], str(error)
    out = layout.artifact(parts.cell)
    shutil.rmtree(out, ignore_errors=True)
    traces = parts.traces[POLICY_TRAIN]
    score = next(policy.score for policy in found if policy.name == LEARNED)
    shipped = fit_lightgbm(parts.data.whole, seed=parts.seed, threads=1)
    save(out, shipped, parts.data, traces.meta, seed=parts.seed, held_out=score, digest=traces.digest())
    return [rate(policy, parts) for policy in found], ""


def judged(parts: Parts, rated: Sequence[Rated], promise: Promise) -> list[Row]:
    """Rows of every policy at every max-drop, and of the three fixed ways, on the test requests."""
    table = parts.tables[TEST]
    fixed = {
        NEVER_RELEASED: table.outcome(table.first_decision(np.empty(0), None)),
        BASE_ONLY: table.base_only(),
        PROMPT_ONLY: prompt_only(table),
    }
    rows = [row for name, outcome in fixed.items() for row in scoped(table, outcome, {"policy": name})]
    for policy in rated:
        for limit in promise.limits:
            rows += tuned(policy, *limit, promise.confidence, measured_noise(parts))
    return with_gaps(rows)


def tuned(policy: Rated, kind: Kind, max_drop: float, confidence: float, noise: Noise | None) -> list[Row]:
    """One policy at one limit: the threshold from the calibration requests, the numbers from the test requests."""
    threshold, p_value = choose(policy.name, policy.calibrate, policy.grid, kind, max_drop, confidence, noise)
    floor = None if noise is None else noise_floor(noise, kind, float(policy.calibrate.table.score.mean()))
    table = policy.test.table
    outcome = table.outcome(table.first_decision(policy.test.scores, threshold))
    head: Row = {
        "policy": policy.name,
        "loss_kind": kind,
        "max_drop": max_drop,
        "confidence": confidence,
        "threshold": threshold,
        "p_value": p_value,
        "noise_floor": floor,
        "n_calibrate": len(policy.calibrate.table),
        **above(table, outcome, max_drop),
    }
    return scoped(table, outcome, head)


def measured_noise(parts: Parts) -> Noise | None:
    """Never against never, as the collection measured it."""
    return parts.traces[CALIBRATE].meta.noise.get(parts.cell.task)


def ended_by_base(parts: Parts, rated: Sequence[Rated], promise: Promise) -> Iterator[Row]:
    """The learnt policy's released requests by how many tokens the base wrote alone, at each limit."""
    for policy in (policy for policy in rated if policy.name == LEARNED):
        for kind, max_drop in promise.limits:
            noise = measured_noise(parts)
            threshold, _ = choose(policy.name, policy.calibrate, policy.grid, kind, max_drop, promise.confidence, noise)
            table = policy.test.table
            outcome = table.outcome(table.first_decision(policy.test.scores, threshold))
            head = {"loss_kind": kind, "max_drop": max_drop}
            yield from ({**head, **row} for row in since_rows(table, outcome, parts.seed))


def choose(
    name: str,
    scored: Scored,
    grid: Floats,
    kind: Kind,
    max_drop: float,
    confidence: float,
    noise: Noise | None = None,
) -> tuple[float | None, float | None]:
    """The threshold as `lorazor tune` sets it, None for never, and the p-value of the last test.

    A max-drop below the noise floor, which `tune` refuses, gives never.
    """
    if name == ORACLE.name:
        return 1.0, None
    if noise is not None and max_drop < noise_floor(noise, kind, float(scored.table.score.mean())):
        return None, None
    threshold, tested = learn_then_test(scored, grid, kind, max_drop, confidence)
    return threshold, tested.p_value


def scoped(table: ReplayTable, outcome: Outcome, head: Row) -> list[Row]:
    """The same operating point over all requests and over those with S > 0."""
    measured = ((scope, numbers(table, outcome, scope)) for scope in SCOPES)
    return [{**head, "scope": scope, **found} for scope, found in measured if found]


def with_gaps(rows: list[Row]) -> list[Row]:
    """`oracle_gap`: the share of the way from the random policy's active-row share to the oracle's, alike tuned."""
    share = {(row["policy"], *_place(row)): float(row["active_row_share"]) for row in rows}
    for row in rows:
        random, oracle = (share.get((name, *_place(row))) for name in (RANDOM, ORACLE.name))
        if row.get("max_drop") is not None and random is not None and oracle is not None and random > oracle:
            row["oracle_gap"] = (random - row["active_row_share"]) / (random - oracle)
    return rows


def _place(row: Row) -> tuple[Any, ...]:
    return row.get("loss_kind"), row.get("max_drop"), row["scope"]
