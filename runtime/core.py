"""What the model runners share: who is released when, which rows are probed, what is recorded and counted.

No vLLM here. A runner tells the core of each admitted request, asks for boundaries and probes, hands in the signals of
each sampled row, and gets release steps back. Everything is keyed by request id, so batch order never matters.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from lorazor.features.errors import InputError
from lorazor.features.grid import boundary, is_decision_step
from lorazor.features.window import Window
from lorazor.policy.artifact import Artifact
from lorazor.policy.rule import Choice, Options, ReleaseRule, choose, parse_options
from lorazor.runtime.config import RuntimeConfig
from lorazor.runtime.guard import GuardedScorer
from lorazor.runtime.ids import public_id
from lorazor.runtime.metrics import decode_delta, encode_delta
from lorazor.runtime.recorder import Recorder
from lorazor.runtime.reports import Report, ReportBook


@dataclass
class StepReport:
    """What one step sends to the scheduler: new requests' arms, new release steps, counter deltas."""

    admitted: dict[str, str] = field(default_factory=dict)
    released: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Sampled:
    """The rows that sampled a token in this step, in batch order.

    Attributes:
        ids: request ids [n].
        steps: c of each row, output tokens before this step [n].
        tokens: chosen tokens int64 [n].
        signals: float32 [n, 4]; NaN where not wanted.
        probes: float32 [n, 5]; NaN where not probed.
    """

    ids: Sequence[str]
    steps: Sequence[int]
    tokens: torch.Tensor
    signals: torch.Tensor
    probes: torch.Tensor


class ReleaseCore:
    """Decides, records and counts for one worker.

    Args:
        artifact: the policy, or None.
        capacity: the most requests that can be followed at once; one more is never released and counted.
    """

    def __init__(self, config: RuntimeConfig, artifact: Artifact | None, capacity: int) -> None:
        self.config, self.artifact = config, artifact
        self.probe_interval = artifact.manifest.probe_interval if artifact else config.probe_interval
        self.rule = ReleaseRule(self.probe_interval)
        self.recorder = Recorder()
        self.totals: Counter[str] = Counter()
        self._window = Window(capacity)
        self._free = list(range(capacity))
        self._rows: dict[str, int] = {}
        self._live: dict[str, tuple[Report, int]] = {}
        self._finished = ReportBook()
        self._step = StepReport()
        self._score = None
        if artifact:
            self._score = GuardedScorer(
                artifact.scorer.score,
                config.policy_timeout,
                lambda why: self.count("lorazor_policy_failures_total", reason=why),
            )

    # ------------------------------------------------------------------ one request
    def admit(
        self,
        request_id: str,
        *,
        adapter: str,
        adapter_fingerprint: str | None,
        prompt_tokens: int,
        max_tokens: int,
        extra_args: Mapping[str, Any] | None,
    ) -> None:
        """Start to follow a request that holds an adapter; options that cannot be read mean "never", counted."""
        try:
            options = parse_options(extra_args)
        except InputError:
            self.count("lorazor_policy_failures_total", reason="options")
            options = Options(release="never")
        choice = self._choose(request_id, adapter, adapter_fingerprint, options)
        self.rule.admit(request_id, choice)
        self._live[request_id] = (Report(public_id(request_id), adapter, choice.arm, choice.task), prompt_tokens)
        self._step.admitted[request_id] = choice.arm
        self.count("lorazor_requests_total", adapter=adapter, task=choice.task or "", arm=choice.arm)
        if choice.arm.startswith("unknown"):
            self.count("lorazor_unknown_total", what=choice.arm.removeprefix("unknown_"))
        if self.config.record and choice.arm == "never":
            self.recorder.start(request_id)
        if choice.threshold is not None:
            self._follow(request_id, choice, prompt_tokens, max_tokens)

    def _choose(self, request_id: str, adapter: str, fingerprint: str | None, options: Options) -> Choice:
        entry = self.artifact.task_of(fingerprint) if self.artifact and fingerprint else None
        tasks = self.artifact.manifest.tasks if self.artifact else {}
        return choose(
            options,
            public_id(request_id),
            pinned=adapter in self.config.pinned,
            has_policy=self.artifact is not None,
            adapter_task=entry.task if entry else None,
            thresholds={name: task.threshold for name, task in tasks.items()},
            release_fraction=self.config.release_fraction,
        )

    def _follow(self, request_id: str, choice: Choice, prompt_tokens: int, max_tokens: int) -> None:
        if not self._free:
            self.count("lorazor_policy_failures_total", reason="capacity")
            return
        assert self.artifact is not None
        row = self._rows[request_id] = self._free.pop()
        mean = self.artifact.manifest.tasks[choice.task or ""].mean_output_tokens
        self._window.reset(
            torch.tensor([row]), torch.tensor([prompt_tokens]), torch.tensor([max_tokens]), torch.tensor([mean])
        )

    def follows(self, request_id: str) -> bool:
        """Whether this request was admitted and has not finished."""
        return request_id in self._live

    def boundary(self, request_id: str) -> int | None:
        """The first position of a released request that runs without its adapter; None while it keeps it."""
        step = self.rule.released(request_id)
        return None if step is None else boundary(self._live[request_id][1], step)

    def wants_signals(self, request_id: str) -> bool:
        """Whether the signals of this request's next token will be used."""
        return request_id in self._rows or request_id in self.recorder

    def wants_probe(self, request_id: str, c: int) -> bool:
        """Whether decode step `c` of this request should be probed."""
        g = self.probe_interval
        return g is not None and self.wants_signals(request_id) and is_decision_step(c, g)

    def forget(self, request_id: str) -> None:
        """A request has finished or was aborted."""
        if request_id not in self._live:
            return
        report, _ = self._live.pop(request_id)
        self._finished.keep(report)
        self.rule.forget(request_id)
        self._unfollow(request_id)

    def _unfollow(self, request_id: str) -> None:
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free.append(row)

    # ------------------------------------------------------------------ one step
    def observe(self, sampled: Sampled) -> None:
        """Take in the sampled rows of a step and decide."""
        self._decide_at_admission(sampled)
        self.recorder.push(sampled.ids, sampled.tokens, sampled.signals, sampled.probes)
        self._push(sampled)
        for request_id, c in zip(sampled.ids, sampled.steps, strict=True):
            if request_id in self._live:
                self._live[request_id][0].output_tokens = c + 1

    def _decide_at_admission(self, sampled: Sampled) -> None:
        new = [i for i, c in zip(sampled.ids, sampled.steps, strict=True) if c == 0 and i in self._live]
        self._decide(new, [0] * len(new))

    def _push(self, sampled: Sampled) -> None:
        index = [k for k, request_id in enumerate(sampled.ids) if request_id in self._rows]
        if not index:
            return
        rows = torch.tensor([self._rows[sampled.ids[k]] for k in index])
        self._window.push(rows, sampled.signals[index].cpu(), sampled.probes[index].cpu())
        due = [k for k in index if self.wants_probe(sampled.ids[k], sampled.steps[k])]
        ready = [k for k in due if not bool(sampled.probes[k].isnan().all())]
        if len(ready) < len(due):
            self.count("lorazor_policy_failures_total", len(due) - len(ready), reason="missing_probe")
        self._decide([sampled.ids[k] for k in ready], [sampled.steps[k] for k in ready])

    def _decide(self, ids: list[str], steps: list[int]) -> None:
        scores = self._scores([i for i, c in zip(ids, steps, strict=True) if self.rule.wants_score(i, c)])
        for request_id, c in zip(ids, steps, strict=True):
            score = scores.get(request_id)
            step = self.rule.decide(request_id, c, score)
            if step is not None:
                self._release(request_id, step, score)

    def _scores(self, ids: list[str]) -> dict[str, float | None]:
        ids = [i for i in ids if i in self._rows]
        if not ids or self._score is None:
            return {}
        features = self._window.features(torch.tensor([self._rows[i] for i in ids]))
        scores = self._score(features.numpy())
        return {i: None if math.isnan(s) else float(s) for i, s in zip(ids, scores, strict=True)}

    def _release(self, request_id: str, step: int, score: float | None) -> None:
        report, _ = self._live[request_id]
        report.release_step, report.score = step, score
        self._step.released[request_id] = step
        adapter, task = report.adapter, report.task or ""
        self.count("lorazor_releases_total", adapter=adapter, task=task, arm=report.arm)
        self.count("lorazor_release_step", adapter=adapter, task=task, step=str(step))
        self._unfollow(request_id)

    def count(self, name: str, by: int = 1, **labels: str) -> None:
        """Add to a counter; the delta goes out with the next step."""
        key = encode_delta(name, labels)
        self.totals[key] += by
        self._step.counts[key] = self._step.counts.get(key, 0) + by

    def take_step(self) -> StepReport:
        """What has come up since the last call."""
        step, self._step = self._step, StepReport()
        return step

    def report(self, public: str) -> dict[str, Any] | None:
        """The report of a live or recent request by its public id."""
        live = [asdict(r) for r, _ in self._live.values() if r.request_id == public]
        return live[0] if live else self._finished.get(public)

    def status(self) -> dict[str, Any]:
        """What runs here: settings, policy, live requests and counter totals."""
        manifest = self.artifact.manifest if self.artifact else None
        return {
            "config": self.config.model_dump(),
            "policy": manifest.model_dump(mode="json", exclude={"trained_on", "threshold_grid"}) if manifest else None,
            "live_requests": len(self._live),
            "counts": [[*decode_delta(key), count] for key, count in sorted(self.totals.items())],
        }
