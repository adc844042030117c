"""One shard of a collection: all runs of a few requests through one continuously filled batch, as rows of the tables.

Never-released and base runs are queued first; a request's released runs join as soon as its trace is there and its
length, hence its release grid, is known. What a run gives does not depend on the shard before it: the engine forgets
cached prefixes in between, so that a resumed collection repeats exactly the batches of an unbroken one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import pandas as pd

from lorazor.features.errors import InputError
from lorazor.features.grid import is_decision_step, release_grid
from lorazor.training.collect_data import Request, Task
from lorazor.training.collect_engine import Engine, Output, Release, Run, Signals
from lorazor.training.config import CollectConfig
from lorazor.training.traces import ADAPTER_SIGNALS, PROBE_SIGNALS, ROLLOUT_COLUMNS

ATTEMPTS = 2  # a released run whose first tokens are not the trace's is repeated once
SEED_BITS = 31


class Meter(Protocol):
    """Who wants to know how far a collection is."""

    def planned(self, task: str, runs: int) -> None:
        """One more request of this task is known to need so many runs."""

    def done(self, tokens: int) -> None:
        """A run has ended after so many output tokens."""


@dataclass(frozen=True)
class Prompted:
    """A request with the tokens of its prompt."""

    request: Request
    prompt: tuple[int, ...]


@dataclass
class _State:
    """What is known of one request so far."""

    index: int
    item: Prompted
    never: Output | None = None
    base: Output | None = None
    signals: Signals | None = None
    forked: bool = False
    released: dict[int, tuple[Output, bool]] = field(default_factory=dict)  # r -> (outcome, differs)


def make_run(key: str, item: Prompted, task: Task, adapter: str | None, release: Release | None) -> Run:
    """A run of a request. Every run of a sampled request has the same seed, so equal prefixes draw equal tokens."""
    sampling = task.config.sampling
    seed = None
    if not sampling.greedy:
        digest = hashlib.sha256(f"{sampling.seed}:{item.request.id}".encode()).digest()
        seed = int.from_bytes(digest[:8], "big") >> (64 - SEED_BITS)
    return Run(key, item.prompt, adapter, release, task.config.max_tokens, sampling, seed)


class Shard:
    """The runs of some requests of one task; `run` gives the rows."""

    def __init__(
        self, name: str, engine: Engine, task: Task, items: Sequence[Prompted], config: CollectConfig, meter: Meter
    ) -> None:
        self.name = name
        self._engine, self._task, self._meter = engine, task, meter
        self._interval, self._forks, self._texts = config.probe_interval, config.rollouts == "forked", config.texts
        self._states = [_State(index, item) for index, item in enumerate(items)]
        self._pending: dict[str, tuple[_State, Release | None, int]] = {}  # key -> (request, release, attempt)

    def run(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Run everything and return the steps and the rollouts, ordered by request."""
        self._engine.reset()
        for state in self._states:
            self._submit(state, "never")
        for state in self._states:
            self._submit(state, None)
        while self._pending:
            self._take(self._engine.step())
        steps = [_step_rows(state, self._task, self._interval) for state in self._states]
        rollouts = [row for state in self._states for row in _rollout_rows(state, self._task)]
        frame = _rollout_frame(rollouts)
        return pd.concat(steps, ignore_index=True), frame if self._texts else frame.drop(columns="text")

    def _submit(self, state: _State, release: Release | None, attempt: int = 1) -> None:
        kind = "base" if release is None else f"r{release}"
        key = f"{self.name}.{state.index}.{kind}.{attempt}"
        adapter = None if release is None else self._task.config.adapter
        self._pending[key] = (state, release, attempt)
        run = make_run(key, state.item, self._task, adapter, release)
        if state.forked and state.never is not None and isinstance(release, int):
            run = replace(run, prefix=state.never.tokens[: release - 1])
        self._engine.submit(run)

    def _take(self, outputs: Sequence[Output]) -> None:
        traced = []
        for output in outputs:
            state, release, attempt = self._pending.pop(output.key)
            given = release - 1 if state.forked and isinstance(release, int) else 0
            self._meter.done(len(output.tokens) - given)
            if release is None:
                state.base = output
            elif release == "never":
                state.never = output
                traced.append(state)
            else:
                self._check_released(state, output, release, attempt)
        if traced:
            self._attach_signals(traced)

    def _attach_signals(self, states: list[_State]) -> None:
        """Fetch the traces of requests that have just ended and queue their released runs."""
        never = {state.never.key: state for state in states if state.never is not None}
        signals = self._engine.take_signals(list(never))
        for key, state in never.items():
            assert state.never is not None
            state.signals = _checked_signals(signals.get(key), state.never, state.item.request, self._interval)
            state.forked = self._forks and self._reads_back(state.item, state.never)
            grid = release_grid(len(state.never.tokens), self._interval)
            self._meter.planned(self._task.name, 2 + len(grid))
            for release in grid:
                self._submit(state, release)

    def _reads_back(self, item: Prompted, output: Output) -> bool:
        """Whether the tokens alone give the text: a tokenizer that reads them otherwise gets whole rollouts."""
        run = make_run(output.key, item, self._task, self._task.config.adapter, "never")
        return self._engine.text_of(run, output.tokens, output.finish_reason) == output.text

    def _check_released(self, state: _State, output: Output, release: int, attempt: int) -> None:
        """Keep a released run whose first r tokens are the trace's; repeat another one, then keep it as differing."""
        assert state.never is not None
        if output.tokens[:release] == state.never.tokens[:release]:
            if output.release_step != release:
                raise InputError(
                    f"request {state.item.request.id} was to release at step {release}, but the engine says "
                    f"{output.release_step}: is the LoRazor plugin loaded (VLLM_PLUGINS)?"
                )
            state.released[release] = (output, False)
        elif attempt < ATTEMPTS:
            self._submit(state, release, attempt + 1)
        else:
            state.released[release] = (output, True)


def _checked_signals(signals: Signals | None, never: Output, request: Request, interval: int) -> Signals:
    """The signals cut to the output: a stop string may end a request after one more token was already sampled."""
    length = len(never.tokens)
    if signals is None or tuple(signals.tokens[:length]) != never.tokens:
        got = "none" if signals is None else f"those of {len(signals.tokens)} other tokens"
        raise InputError(
            f"request {request.id}: the engine recorded no signals for its {length} tokens (got {got}): "
            "is the LoRazor plugin loaded (VLLM_PLUGINS)?"
        )
    probes = signals.probes[:length].copy()
    due = np.array([is_decision_step(step, interval) for step in range(length)], bool)
    probes[~due] = np.nan
    if due.any() and np.isnan(probes[due]).all():
        raise InputError(f"request {request.id}: the engine gave no base logits at any of {due.sum()} probe steps")
    return Signals(signals.tokens[:length], signals.signals[:length], probes)


def _step_rows(state: _State, task: Task, interval: int) -> pd.DataFrame:
    assert state.signals is not None
    length = len(state.signals.tokens)
    constants = {
        "request_id": state.item.request.id,
        "task": task.name,
        "adapter": task.config.adapter,
        "step": np.arange(length, dtype=np.int32),
        "token_id": state.signals.tokens,
        "prompt_tokens": np.int32(len(state.item.prompt)),
        "max_tokens": np.int32(task.config.max_tokens),
    }
    signals = {name: state.signals.signals[:, k] for k, name in enumerate(ADAPTER_SIGNALS)}
    probed = np.array([is_decision_step(step, interval) for step in range(length)], bool)
    probes = {name: state.signals.probes[:, k] for k, name in enumerate(PROBE_SIGNALS)}
    return pd.DataFrame({**constants, **signals, "probed": probed, **probes}, index=range(length))


def _rollout_rows(state: _State, task: Task) -> list[dict[str, Any]]:
    """The rows of one request: never released, base, then released by step."""
    assert state.never is not None
    assert state.base is not None
    outcomes: list[tuple[str, int | None, Output, bool]] = [
        ("adapter", None, state.never, False),
        ("base", None, state.base, False),
        *(("released", r, *state.released[r]) for r in sorted(state.released)),
    ]
    request = state.item.request
    return [
        {
            "request_id": request.id,
            "task": task.name,
            "adapter": task.config.adapter,
            "mode": mode,
            "release_step": release,
            "score": task.scorer(output.text, request.row, request.id),
            "output_tokens": len(output.tokens),
            "finish_reason": output.finish_reason,
            "same_text": output.text == state.never.text,
            "differs": differs,
            "text": output.text if mode == "adapter" or output.text != state.never.text else None,
        }
        for mode, release, output, differs in outcomes
    ]


def _rollout_frame(rows: list[dict[str, Any]]) -> pd.DataFrame:
    frame = pd.DataFrame(rows, columns=ROLLOUT_COLUMNS.names)
    return frame.astype({"release_step": "Int32", "score": "float32", "output_tokens": "int32"})
