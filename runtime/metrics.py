"""Prometheus metrics: what the scheduler counts, carried to the API process, the only one that serves `/metrics`.

The engine runs in another process, where prometheus_client counters would never be seen, and vLLM's statistics have no
room for more fields. So the scheduler ships *deltas* as extra entries of `SchedulerStats.running_lora_adapters`, a
dict[str, int] that is empty there: key = `encode_delta(name, labels)`, value = how much to add. `LoRazorStatLogger`
takes them out again before vLLM's own logger reads the dict. Deltas rather than totals, because every API server of a
group sees only its own part.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vllm.v1.metrics.loggers import StatLoggerBase

# No adapter name starts with NUL, so an entry of ours is never mistaken for an adapter.
DELTA_PREFIX = "\0lorazor:"
STEP_BUCKETS = (1, 3, 6, 10, 18, 34, 66, 130, 258, 514, 1026, 2050, 4098)


@dataclass(frozen=True)
class Metric:
    """One metric: its labels, its help text; `scale` turns the integer delta into the exported unit."""

    labels: tuple[str, ...]
    help: str
    kind: Literal["counter", "histogram"] = "counter"
    export: str = ""
    scale: float = 1.0


METRICS: dict[str, Metric] = {
    "lorazor_requests_total": Metric(
        ("adapter", "task", "arm"), "Requests with an adapter, by the arm of the live A/B that their id puts them in."
    ),
    "lorazor_releases_total": Metric(("adapter", "task", "arm"), "Requests that released their adapter."),
    "lorazor_release_step": Metric(
        ("adapter", "task"), "Release step: output tokens produced with the adapter.", kind="histogram"
    ),
    "lorazor_rows": Metric((), "Row-steps scheduled with an adapter or after its release."),
    "lorazor_active_rows": Metric((), "Row-steps that still held their adapter; over lorazor_rows: active-row share."),
    "lorazor_swaps_total": Metric(
        ("way",),
        "Adapters put into slots, by the way: prefetched, from an image on the host, or stock (vLLM's own).",
    ),
    "lorazor_swap_microseconds_total": Metric(
        (), "Host time of steps spent on adapters put into slots.", export="lorazor_swap_seconds_total", scale=1e-6
    ),
    "lorazor_probe_microseconds_total": Metric(
        (), "Time spent on base logits over the same KV cache.", export="lorazor_probe_seconds_total", scale=1e-6
    ),
    "lorazor_probes_total": Metric((), "Rows whose base logits were computed."),
    "lorazor_policy_failures_total": Metric(("reason",), "Decisions that failed; their requests keep the adapter."),
    "lorazor_unknown_total": Metric(
        ("what",), "Requests whose adapter or task the policy does not know; they never release."
    ),
}
# Clients name tasks (`lorazor_task`), and a label value is kept for ever: beyond this many, new ones are OTHER_TASK.
MAX_TASKS = 200
OTHER_TASK = "other"
# A histogram's observed value travels as one more label.
_OBSERVED = "step"


def encode_delta(name: str, labels: Mapping[str, str]) -> str:
    """The key under which the scheduler ships "add n to this metric": `"\\0lorazor:[name,{labels}]"`.

    `lorazor_release_step` carries its value as the label `step`. ValueError for a metric or label that is not in
    `METRICS`: a slip in the caller, not bad input.
    """
    metric = METRICS.get(name)
    if metric is None:
        raise ValueError(f"no metric {name!r}; known are {', '.join(METRICS)}")
    expected = {*metric.labels, _OBSERVED} if metric.kind == "histogram" else set(metric.labels)
    if set(labels) != expected:
        raise ValueError(f"metric {name} has the labels {sorted(expected)}, not {sorted(labels)}")
    return DELTA_PREFIX + json.dumps([name, dict(labels)], separators=(",", ":"))


def decode_delta(key: str) -> tuple[str, dict[str, str]]:
    """What `encode_delta` put into a key: metric name and labels."""
    name, labels = json.loads(key.removeprefix(DELTA_PREFIX))
    return str(name), labels


class LoRazorStatLogger(StatLoggerBase):
    """vLLM's stat-logger plugin of LoRazor: one per engine, all of them feeding the same collectors.

    Without a "lorazor" key in `additional_config` it registers nothing and looks at nothing.
    """

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        asked = getattr(vllm_config, "additional_config", None)
        self._collectors = _collectors() if isinstance(asked, Mapping) and "lorazor" in asked else None

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        """Move our entries from the statistics into the collectors; vLLM's own loggers are called after this one."""
        if self._collectors is None or scheduler_stats is None:
            return
        adapters: dict[str, int] = scheduler_stats.running_lora_adapters
        for key in [key for key in adapters if key.startswith(DELTA_PREFIX)]:
            _add(self._collectors, key, adapters.pop(key))

    def log_engine_initialized(self) -> None:
        """Nothing to say: the collectors exist from the start."""


def _add(collectors: dict[str, Any], key: str, amount: int) -> None:
    name, labels = decode_delta(key)
    metric, collector = METRICS[name], collectors[name]
    if "task" in labels:
        labels["task"] = _bounded(labels["task"])
    step = labels.pop(_OBSERVED, None) if metric.kind == "histogram" else None
    child = collector.labels(**labels) if metric.labels else collector
    if step is None:
        child.inc(amount * metric.scale)
    else:
        for _ in range(amount):
            child.observe(int(step))


_tasks: set[str] = set()


def _bounded(task: str) -> str:
    if task not in _tasks and len(_tasks) >= MAX_TASKS:
        return OTHER_TASK
    _tasks.add(task)
    return task


_registered: dict[str, Any] = {}


def _collectors() -> dict[str, Any]:
    # Once a process: a registry refuses the same name twice, and several engines share these.
    if not _registered:
        from prometheus_client import Counter, Histogram

        for name, metric in METRICS.items():
            exported = metric.export or name
            _registered[name] = (
                Histogram(exported, metric.help, metric.labels, buckets=STEP_BUCKETS)
                if metric.kind == "histogram"
                else Counter(exported, metric.help, metric.labels)
            )
    return _registered
