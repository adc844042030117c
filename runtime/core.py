"""What the model runners share: who is released when, which rows are probed, what is recorded and counted.

No vLLM here. A runner tells the core of each admitted request, asks for boundaries and probes, hands in the signals of
each sampled row, and gets release steps back. Everything is keyed by request id, so batch order never matters.

Under tensor parallelism one rank decides, for what a policy gives must not differ between ranks. Its decisions go to
the scheduler and come back to every rank with a later step; those at admission, which take effect at once, go from
rank to rank (`admissions`). What a rank runs, boundaries and probes, follows from these alone.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from threading import RLock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lorazor.features.errors import InputError
from lorazor.features.grid import boundary, is_decision_step, is_decision_step_of_each
from lorazor.policy.artifact import Artifact
from lorazor.policy.manifest import TaskPolicy
from lorazor.policy.rule import Choice, Options, ReleaseRule, choose, parse_options
from lorazor.runtime.config import RuntimeConfig
from lorazor.runtime.counters import Counters
from lorazor.runtime.ids import public_id, sibling
from lorazor.runtime.recorder import Recorder
from lorazor.runtime.reports import Report, ReportBook
from lorazor.runtime.scoring import Followed

Steps = Sequence[int] | NDArray[np.integer[Any]]


@dataclass
class StepReport:
    """What one step sends to the scheduler: new requests' arms, new release steps, counter deltas, and the requests
    about which nothing more will be decided."""

    admitted: dict[str, str] = field(default_factory=dict)
    released: dict[str, int] = field(default_factory=dict)
    given_up: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Admitted:
    """A new request that holds an adapter; `fingerprint` is None where the adapter's files cannot be read."""

    request_id: str
    adapter: str
    fingerprint: str | None
    prompt_tokens: int
    max_tokens: int
    extra_args: Mapping[str, Any] | None


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


FAILURES = "lorazor_policy_failures_total"
_ENDED = 1 << 62  # more tokens than any step of a request that has ended comes after


class ReleaseCore:
    """Decides, records and counts for one worker.

    Args:
        artifact: the policy, or None.
        capacity: the most requests that can be followed at once; one more is never released and counted.
        decides: whether this rank does.

    Attributes:
        lock: for callers in several threads; steps that overlap are read in another one than they are launched in.
    """

    def __init__(self, config: RuntimeConfig, artifact: Artifact | None, capacity: int, decides: bool = True) -> None:
        self.config, self.artifact, self.decides = config, artifact, decides
        self.lock = RLock()
        self.probe_interval = artifact.manifest.probe_interval if artifact else config.probe_interval
        self.rule = ReleaseRule(self.probe_interval)
        self.recorder = Recorder()
        self.counters = Counters()
        self.reports = ReportBook()
        self.followed = (
            Followed(artifact, capacity, config.policy_timeout, lambda why: self.counters.add(FAILURES, reason=why))
            if artifact
            else None
        )
        self._live: dict[str, tuple[Report, int]] = {}
        self._made: dict[str, int] = {}  # output tokens
        self._probed: set[str] = set()
        self._step = StepReport()

    # ------------------------------------------------------------------ one request
    def admit(self, *new: Admitted) -> None:
        """Follow requests from now on, and decide on their admission; unreadable options mean "never", counted."""
        for one in new:
            self._admit(one)
        # Now, not with the prompt's first token: where steps overlap, the next step is launched before that is read.
        if self.decides:
            self._decide([(one.request_id, 0) for one in new])
            self._probed.update(one.request_id for one in new if self.wants_signals(one.request_id))

    def _admit(self, new: Admitted) -> None:
        choice = self._choose(new)
        self.rule.admit(new.request_id, choice)
        report = Report(public_id(new.request_id), new.adapter, choice.arm, choice.task, sibling(new.request_id))
        self._live[new.request_id], self._made[new.request_id] = (report, new.prompt_tokens), 0
        if self.decides:
            self._step.admitted[new.request_id] = choice.arm
        self.counters.add("lorazor_requests_total", adapter=new.adapter, task=self._label(choice.task), arm=choice.arm)
        if choice.arm.startswith("unknown"):
            self.counters.add("lorazor_unknown_total", what=choice.arm.removeprefix("unknown_"))
        if self.config.record and choice.arm == "never":
            self.recorder.start(new.request_id)
        if (
            choice.threshold is not None
            and self.followed is not None
            and not self.followed.start(new.request_id, choice.task or "", new.prompt_tokens, new.max_tokens)
        ):
            self.counters.add(FAILURES, reason="capacity")

    def admissions(self, ids: Sequence[str]) -> tuple[dict[str, int], list[str]]:
        """What was decided about these requests at admission: release steps, and which of them are probed."""
        released = {i: self._step.released[i] for i in ids if i in self._step.released}
        return released, [i for i in ids if i in self._probed]

    def follow(self, admissions: tuple[dict[str, int], list[str]]) -> None:
        """Take in the deciding rank's `admissions`, on any rank."""
        released, probed = admissions
        self.take_in(released)
        self._probed.update(probed)

    def take_in(self, released: Mapping[str, int], given_up: Collection[str] = ()) -> None:
        """What was decided, the same on every rank: the release steps, and whose probes are not needed any more."""
        for request_id in (i for i in released if i in self._live):
            if self.rule.released(request_id) is None:
                self.rule.release(request_id, released[request_id])
                self._unfollow(request_id)
        self._probed.difference_update(released, given_up)

    def _choose(self, new: Admitted) -> Choice:
        entry = self.artifact.task_of(new.fingerprint) if self.artifact and new.fingerprint else None
        return choose(
            self._options(new),
            public_id(new.request_id),
            pinned=new.adapter in self.config.pinned,
            has_policy=self.artifact is not None,
            knows_adapter=entry is not None,
            adapter_task=entry.task if entry else None,
            thresholds={name: task.threshold for name, task in self._tasks().items()},
            release_fraction=self.config.release_fraction,
        )

    def _options(self, new: Admitted) -> Options:
        try:
            return parse_options(new.extra_args)
        except InputError:
            self.counters.add(FAILURES, reason="options")
            return Options(release="never")

    def _tasks(self) -> Mapping[str, TaskPolicy]:
        return self.artifact.manifest.tasks if self.artifact else {}

    def _label(self, task: str | None) -> str:
        """A task as a label: names that clients make up must not become ever more time series."""
        return "" if task is None else task if task in self._tasks() else "other"

    def follows(self, request_id: str) -> bool:
        """Whether this request was admitted and has not finished."""
        return request_id in self._live

    def unobserved(self, ids: Sequence[str], steps: Steps) -> NDArray[np.bool_]:
        """Which of these requests at these c have not been observed there yet [n]; none that has ended."""
        made = np.fromiter(map(self._made.get, ids, repeat(_ENDED)), np.int64, len(ids))
        fresh: NDArray[np.bool_] = np.asarray(steps) >= made
        return fresh

    def boundary(self, request_id: str) -> int | None:
        """The first position of a released request that runs without its adapter; None while it keeps it."""
        step = self.rule.released(request_id)
        return None if step is None else boundary(self._live[request_id][1], step)

    def wants_signals(self, request_id: str) -> bool:
        """Whether the signals of this request's next token will be used."""
        return (self.followed is not None and request_id in self.followed) or request_id in self.recorder

    def wanting(self, ids: Sequence[str], places: NDArray[np.int32]) -> NDArray[np.bool_]:
        """For which of these requests, in these places of `followed`, `wants_signals` [n]."""
        wanted: NDArray[np.bool_] = places >= 0
        return wanted | np.array([i in self.recorder for i in ids], np.bool_) if self.config.record else wanted

    def may_probe(self, steps: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
        """Where `wants_probe` may say so: at decision steps."""
        g = self.probe_interval
        return np.zeros(len(steps), np.bool_) if g is None else is_decision_step_of_each(steps, g)

    def wants_probe(self, request_id: str, c: int) -> bool:
        """Whether decode step `c` of this request should be probed."""
        return request_id in self._probed and self._is_due(c)

    def _is_due(self, c: int) -> bool:
        return self.probe_interval is not None and is_decision_step(c, self.probe_interval)

    def give_up(self, ids: Sequence[str]) -> None:
        """Decide nothing more for these requests: a step of their past is missing."""
        lost = [i for i in ids if self.followed is not None and i in self.followed]
        self.counters.add(FAILURES, len(lost), reason="signals")
        for request_id in lost:
            self._step.given_up.append(request_id)
            self._unfollow(request_id)

    def _unfollow(self, request_id: str) -> None:
        if self.followed is not None:
            self.followed.stop(request_id)

    def forget(self, request_id: str) -> None:
        """A request has finished or was aborted."""
        if request_id in self._live:
            self.reports.keep(self._report(request_id))
            del self._live[request_id], self._made[request_id]
            self.rule.forget(request_id)
            self._probed.discard(request_id)
            self._unfollow(request_id)

    # ------------------------------------------------------------------ one step
    def observe(self, sampled: Sampled) -> None:
        """Take in the sampled rows of a step and decide."""
        self.recorder.push(sampled.ids, sampled.tokens, sampled.signals, sampled.probes)
        index = [k for k, request_id in enumerate(sampled.ids) if self.followed and request_id in self.followed]
        if index and self.followed is not None:
            self.followed.push([sampled.ids[k] for k in index], sampled.signals[index], sampled.probes[index])
        unprobed = sampled.probes.isnan().all(dim=1).tolist()
        probed = {i for i, missing in zip(sampled.ids, unprobed, strict=True) if not missing}
        self._observe(sampled.ids, sampled.steps, probed, None)

    def observe_scores(self, ids: Sequence[str], steps: Steps, scores: Mapping[str, float]) -> None:
        """Take in the sampled rows of a step, c of each, whose windows are on a device, and decide.

        `scores` are those of the probed rows; NaN where the device could give none.
        """
        self._observe(ids, steps, scores.keys(), scores)

    def _observe(
        self, ids: Sequence[str], steps: Steps, probed: Container[str], scores: Mapping[str, float] | None
    ) -> None:
        steps, followed = np.asarray(steps), self.followed
        at = np.flatnonzero(self.may_probe(steps)) if followed is not None else ()
        due = [(ids[k], int(steps[k])) for k in at if followed is not None and ids[k] in followed]
        ready = [(i, c) for i, c in due if i in probed]
        if len(ready) < len(due):
            self.counters.add(FAILURES, len(due) - len(ready), reason="missing_probe")
        self._decide(ready, scores)
        self._made.update(zip(ids, (steps + 1).tolist(), strict=True))

    def _decide(self, due: Sequence[tuple[str, int]], given: Mapping[str, float] | None = None) -> None:
        """Decide for (request id, decision step) pairs, on the scores given or with one call of the policy."""
        asked = [i for i, c in due if self.followed and i in self.followed and self.rule.wants_score(i, c)]
        scores: dict[str, float | None] = {}
        if self.followed and asked:
            scores = (
                self.followed.scores(asked) if given is None else self.followed.checked({i: given[i] for i in asked})
            )
        for request_id, c in due:
            step = self.rule.decide(request_id, c, scores.get(request_id))
            if step is not None:
                self._release(request_id, step, scores.get(request_id))

    def _release(self, request_id: str, step: int, score: float | None) -> None:
        report, _ = self._live[request_id]
        report.release_step, report.score = step, score
        self._step.released[request_id] = step
        adapter, task = report.adapter, self._label(report.task)
        self.counters.add("lorazor_releases_total", adapter=adapter, task=task, arm=report.arm)
        self.counters.add("lorazor_release_step", adapter=adapter, task=task, step=str(step))
        self._unfollow(request_id)

    def take_step(self) -> StepReport:
        """What has come up since the last call."""
        step, self._step = self._step, StepReport()
        step.counts = self.counters.take()
        return step

    # ------------------------------------------------------------------ for the endpoints
    def report(self, public: str) -> dict[str, Any] | None:
        """The report of a live or recent request by its public id."""
        live = [i for i, (report, _) in self._live.items() if report.request_id == public]
        return self.reports.get(public, [self._report(i) for i in live])

    def _report(self, request_id: str) -> Report:
        report, _ = self._live[request_id]
        report.output_tokens = self._made[request_id]
        return report

    def status(self) -> dict[str, Any]:
        """What runs here: settings, policy, live requests and counter totals."""
        manifest = self.artifact.manifest if self.artifact else None
        return {
            "config": self.config.model_dump(),
            "policy": manifest.model_dump(mode="json", exclude={"trained_on", "threshold_grid"}) if manifest else None,
            "live_requests": len(self._live),
            "counts": self.counters.totals(),
        }
