"""What the model runners share: who is released when, which rows are probed, what is recorded and counted.

No vLLM here. A runner tells the core of each admitted request, asks for boundaries and probes, hands in the signals of
each sampled row, and gets release steps back. Everything is keyed by request id, so batch order never matters.

Under tensor parallelism one rank decides, for what a policy gives must not differ between ranks. Its decisions go to
the scheduler and come back to every rank with a later step; those at admission, which take effect at once, go from
rank to rank (`admissions`). What a rank runs, boundaries and probes, follows from these alone.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from itertools import compress
from threading import RLock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lorazor.features.grid import boundary, is_decision_step, is_decision_step_of_each
from lorazor.policy.artifact import Artifact
from lorazor.policy.rule import Choice, ReleaseRule
from lorazor.runtime.arms import Arms
from lorazor.runtime.config import RuntimeConfig
from lorazor.runtime.core_values import Admitted, Sampled, StepReport
from lorazor.runtime.counters import Counters
from lorazor.runtime.ids import public_id, sibling
from lorazor.runtime.recorder import Recorder
from lorazor.runtime.reports import Report, ReportBook
from lorazor.runtime.scoring import Followed


class ReleaseCore:
    """Decides, records and counts for one worker.

    Args:
        artifact: the policy, or None.
        capacity: the most requests that can be followed at once; one more is never released and counted.
        decides: whether this rank does.

    Attributes:
        probes: whether decisions want probes; without them they rest on what the adapter's own steps show.
        lock: for callers in several threads; steps that overlap are read in another one than they are launched in.
        reports: every live request, and what the endpoints tell of it and of recent ones.
        followed: the live requests that the policy may still release; None without a policy.
    """

    def __init__(self, config: RuntimeConfig, artifact: Artifact | None, capacity: int, decides: bool = True) -> None:
        self.config, self.artifact, self.decides = config, artifact, decides
        self.lock = RLock()
        self.probe_interval = artifact.manifest.probe_interval if artifact else config.probe_interval
        self.probes = artifact is None or artifact.manifest.probes
        self.rule = ReleaseRule(self.probe_interval)
        self.recorder, self.counters, self.reports = Recorder(), Counters(), ReportBook()
        self.arms = Arms(config, artifact, self.counters)
        timeout, on_failure = config.policy_timeout, self.counters.add_failures
        self.followed = Followed(artifact, capacity, timeout, on_failure) if artifact else None
        self._prompt_tokens: dict[str, int] = {}
        self._probed: set[str] = set()
        self._step = StepReport()

    # ------------------------------------------------------------------ a request comes and goes
    def admit(self, *new: Admitted) -> None:
        """Take in new requests, and decide on their admission."""
        for one in new:
            self._admit(one)
        # Now, not with the prompt's first token: where steps overlap, the next step is launched before that is read.
        if self.decides:
            self._decide([(one.request_id, 0) for one in new])
            if self.probes:
                self._probed.update(one.request_id for one in new if self.wants_signals(one.request_id))

    def _admit(self, new: Admitted) -> None:
        request_id, choice = new.request_id, self.arms.choose(new)
        self.rule.admit(request_id, choice)
        report = Report(public_id(request_id), new.adapter, choice.arm, choice.task, sibling(request_id))
        self.reports.start(request_id, report)
        self._prompt_tokens[request_id] = new.prompt_tokens
        if self.decides:
            self._step.admitted[request_id] = choice.arm
        if self.config.record and choice.arm == "never":
            self.recorder.start(request_id)
        self._follow(new, choice)

    def _follow(self, new: Admitted, choice: Choice) -> None:
        if self.followed is None or choice.threshold is None:
            return
        if not self.followed.start(new.request_id, choice.task or "", new.prompt_tokens, new.max_tokens):
            self.counters.add_failures("capacity")

    def _unfollow(self, request_id: str) -> None:
        if self.followed is not None:
            self.followed.stop(request_id)

    def _is_followed(self, request_id: str) -> bool:
        return self.followed is not None and request_id in self.followed

    def is_live(self, request_id: str) -> bool:
        """Whether this request was admitted and has not finished."""
        return request_id in self.reports.live

    def give_up(self, ids: Sequence[str]) -> None:
        """Decide nothing more for these requests: a step of their past is missing."""
        lost = [i for i in ids if self._is_followed(i)]
        self.counters.add_failures("signals", len(lost))
        self._step.given_up += lost
        for request_id in lost:
            self._unfollow(request_id)

    def forget(self, request_id: str) -> None:
        """A request has finished or was aborted."""
        if self.is_live(request_id):
            self.reports.finish(request_id)
            del self._prompt_tokens[request_id]
            self.rule.forget(request_id)
            self._probed.discard(request_id)
            self._unfollow(request_id)

    # ------------------------------------------------------------------ from the rank that decides
    def admissions(self, ids: Sequence[str]) -> tuple[dict[str, int], list[str]]:
        """What was decided about these requests at admission: release steps, and which of them are probed."""
        released = {i: self._step.released[i] for i in ids if i in self._step.released}
        return released, [i for i in ids if i in self._probed]

    def take_in_admissions(self, admissions: tuple[dict[str, int], list[str]]) -> None:
        """Take in the deciding rank's `admissions`, on any rank."""
        released, probed = admissions
        self.take_in(released)
        self._probed.update(probed)

    def take_in(self, released: Mapping[str, int], given_up: Collection[str] = ()) -> None:
        """What was decided, the same on every rank: the release steps, and whose probes are not needed any more."""
        for request_id in filter(self.is_live, released):
            if self.rule.released(request_id) is None:
                self.rule.release(request_id, released[request_id])
                self._unfollow(request_id)
        self._probed.difference_update(released, given_up)

    # ------------------------------------------------------------------ before a step
    def boundary(self, request_id: str) -> int | None:
        """The first position of a released request that runs without its adapter; None while it keeps it."""
        step = self.rule.released(request_id)
        return None if step is None else boundary(self._prompt_tokens[request_id], step)

    def wants_signals(self, request_id: str) -> bool:
        """Whether the signals of this request's next token will be used."""
        return self._is_followed(request_id) or request_id in self.recorder

    def wanting(self, ids: Sequence[str], places: NDArray[np.int32]) -> NDArray[np.bool_]:
        """For which of these requests, in these places of `followed`, `wants_signals` [n]."""
        wanted: NDArray[np.bool_] = places >= 0
        return wanted | np.array([i in self.recorder for i in ids], np.bool_) if self.config.record else wanted

    def may_decide(self, steps: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
        """Where decisions may fall [n], and probes if they want any: at decision steps."""
        g = self.probe_interval
        return np.zeros(len(steps), np.bool_) if g is None else is_decision_step_of_each(steps, g)

    def wants_probe(self, request_id: str, c: int) -> bool:
        """Whether decode step `c` of this request should be probed."""
        g = self.probe_interval
        return g is not None and request_id in self._probed and is_decision_step(c, g)

    # ------------------------------------------------------------------ after a step
    def observe(self, sampled: Sampled) -> None:
        """Take in the sampled rows of a step and decide."""
        self.recorder.push(sampled.ids, sampled.tokens, sampled.signals, sampled.probes)
        if self.followed is not None:
            self.followed.push(sampled.ids, sampled.signals, sampled.probes)
        seen = ~sampled.probes.isnan().all(dim=1) | (not self.probes)
        self._observe(sampled.ids, sampled.steps, set(compress(sampled.ids, seen.tolist())), None)

    def observe_scores(self, ids: Sequence[str], steps: NDArray[np.integer[Any]], scores: Mapping[str, float]) -> None:
        """Take in the sampled rows of a step, c of each, int [n], whose windows are on a device, and decide.

        `scores` are those of the rows that are due, and probed if need be; NaN where the device could give none.
        """
        self._observe(ids, steps, scores.keys(), scores)

    def _observe(
        self,
        ids: Sequence[str],
        steps: NDArray[np.integer[Any]],
        seen: Container[str],
        scores: Mapping[str, float] | None,
    ) -> None:
        at = np.flatnonzero(self.may_decide(steps))
        due = [(ids[k], int(steps[k])) for k in at if self._is_followed(ids[k])]
        ready = [(i, c) for i, c in due if i in seen]
        if len(ready) < len(due):
            self.counters.add_failures("missing_probe", len(due) - len(ready))
        self._decide(ready, scores)
        self.reports.count(ids, steps)

    def _decide(self, due: Sequence[tuple[str, int]], given: Mapping[str, float] | None = None) -> None:
        """Decide for (request id, decision step) pairs, on the scores given or with one call of the policy."""
        scores = self._scores([i for i, c in due if self.rule.wants_score(i, c)], given)
        for request_id, c in due:
            score = scores.get(request_id)
            step = self.rule.decide(request_id, c, score)
            if step is not None:
                self._release(request_id, step, score)

    def _scores(self, wanted: Sequence[str], given: Mapping[str, float] | None) -> Mapping[str, float | None]:
        asked = [i for i in wanted if self._is_followed(i)]
        if self.followed is None or not asked:
            return {}
        return self.followed.scores(asked) if given is None else self.followed.checked({i: given[i] for i in asked})

    def _release(self, request_id: str, step: int, score: float | None) -> None:
        report = self.reports.live[request_id]
        report.release_step, report.score = step, score
        self._step.released[request_id] = step
        self.arms.count_release(report)
        self._unfollow(request_id)

    def take_step(self) -> StepReport:
        """What has come up since the last call."""
        step, self._step = self._step, StepReport()
        step.counts = self.counters.take()
        return step

    def status(self) -> dict[str, Any]:
        """What runs here: settings, policy, live requests and counter totals."""
        manifest = self.artifact.manifest if self.artifact else None
        return {
            "config": self.config.model_dump(),
            "policy": manifest.model_dump(mode="json", exclude={"trained_on", "threshold_grid"}) if manifest else None,
            "live_requests": len(self.reports.live),
            "counts": self.counters.totals(),
        }
