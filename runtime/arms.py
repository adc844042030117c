"""Which arm and task a request gets at admission, and how many requests and releases each arm has."""

from __future__ import annotations

from lorazor.features.errors import InputError
from lorazor.policy.artifact import Artifact
from lorazor.policy.rule import Choice, Options, choose, parse_options
from lorazor.runtime.config import RuntimeConfig
from lorazor.runtime.core_values import Admitted
from lorazor.runtime.counters import Counters
from lorazor.runtime.ids import public_id
from lorazor.runtime.reports import Report


class Arms:
    """Chooses by the operator's settings, the policy (None: there is none) and what the request asks for."""

    def __init__(self, config: RuntimeConfig, artifact: Artifact | None, counters: Counters) -> None:
        self.config = config
        self._artifact, self._counters = artifact, counters
        tasks = artifact.manifest.tasks if artifact else {}
        self._thresholds = {name: task.threshold for name, task in tasks.items()}

    def choose(self, new: Admitted) -> Choice:
        """What may happen to a new request, counted; unreadable options mean "never", counted as a failure."""
        entry = self._artifact.task_of(new.fingerprint) if self._artifact and new.fingerprint else None
        choice = choose(
            self._options(new),
            public_id(new.request_id),
            pinned=new.adapter in self.config.pinned,
            has_policy=self._artifact is not None,
            knows_adapter=entry is not None,
            adapter_task=entry.task if entry else None,
            thresholds=self._thresholds,
            release_fraction=self.config.release_fraction,
        )
        self._count(new.adapter, choice)
        return choice

    def _options(self, new: Admitted) -> Options:
        try:
            return parse_options(new.extra_args)
        except InputError:
            self._counters.add_failures("options")
            return Options(release="never")

    def _count(self, adapter: str, choice: Choice) -> None:
        self._counters.add("lorazor_requests_total", adapter=adapter, task=self._label(choice.task), arm=choice.arm)
        if choice.arm.startswith("unknown"):
            self._counters.add("lorazor_unknown_total", what=choice.arm.removeprefix("unknown_"))

    def count_release(self, report: Report) -> None:
        """Count a request that has just been released, and its release step."""
        adapter, task = report.adapter, self._label(report.task)
        self._counters.add("lorazor_releases_total", adapter=adapter, task=task, arm=report.arm)
        self._counters.add("lorazor_release_step", adapter=adapter, task=task, step=str(report.release_step))

    def _label(self, task: str | None) -> str:
        """A task as a label: names that clients make up must not become ever more time series."""
        return "" if task is None else task if task in self._thresholds else "other"
