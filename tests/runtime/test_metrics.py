"""Deltas through vLLM's real SchedulerStats into real Prometheus collectors."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

from lorazor.runtime import metrics  # noqa: E402
from lorazor.runtime.metrics import LoRazorStatLogger, decode_delta, encode_delta  # noqa: E402

DOCS = Path(__file__).parents[2] / "docs" / "operate.md"
LABELS = {"adapter": "sql", "task": "wikisql", "arm": "policy"}


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A registry of its own in place of the process-wide default one."""
    import prometheus_client

    fresh = prometheus_client.CollectorRegistry()
    monkeypatch.setattr(metrics, "_registered", {})
    monkeypatch.setattr(metrics, "_tasks", set())
    for name in ("Counter", "Histogram"):
        kind = getattr(prometheus_client, name)
        monkeypatch.setattr(prometheus_client, name, lambda *a, _kind=kind, **k: _kind(*a, registry=fresh, **k))
    return fresh


def make_logger(additional_config: Any, engine: int = 0) -> LoRazorStatLogger:
    """A stat logger as vLLM builds it: from the configuration and the index of the engine."""
    return LoRazorStatLogger(SimpleNamespace(additional_config=additional_config), engine)


def make_stats(entries: dict[str, int]) -> Any:
    """vLLM's own statistics with these running adapters, after the msgpack trip that they take between processes."""
    import msgspec
    from vllm.v1.metrics.stats import SchedulerStats

    stats = SchedulerStats(num_running_reqs=3, running_lora_adapters=entries)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(stats), type=SchedulerStats)


def test_encode_delta_round_trips() -> None:
    """A key gives back name and labels, whatever characters an adapter's name has."""
    labels = {**LABELS, "adapter": 'ä "quoted" \n\0name'}
    key = encode_delta("lorazor_releases_total", labels)
    assert key.startswith("\0lorazor:")
    assert decode_delta(key) == ("lorazor_releases_total", labels)


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("lorazor_realeses_total", LABELS),
        ("lorazor_releases_total", {"adapter": "sql"}),
        ("lorazor_rows", {"adapter": "sql"}),
        ("lorazor_release_step", {"adapter": "sql", "task": "wikisql"}),
    ],
)
def test_encode_delta_refuses_a_slip(name: str, labels: dict[str, str]) -> None:
    """An unknown metric or another set of labels fails where it is written, not where it is read."""
    with pytest.raises(ValueError, match="lorazor_"):
        encode_delta(name, labels)


def test_deltas_add_up_and_leave_vllms_entries_alone(registry: Any) -> None:
    """Counters grow by the deltas of every engine; vLLM's own adapters stay in the dict and ours are gone."""
    first, second = make_logger({"lorazor": {}}), make_logger({"lorazor": {}}, engine=1)
    key = encode_delta("lorazor_releases_total", LABELS)
    stats = make_stats({"stock-adapter": 2, key: 3, encode_delta("lorazor_rows", {}): 7})
    first.record(stats, None, mm_cache_stats=None, engine_idx=0)
    assert stats.running_lora_adapters == {"stock-adapter": 2}
    second.record(make_stats({key: 2}), None, None, 1)
    assert registry.get_sample_value("lorazor_releases_total", LABELS) == 5
    assert registry.get_sample_value("lorazor_rows_total") == 7


def test_probe_time_is_exported_in_seconds(registry: Any) -> None:
    """Integer microseconds travel; seconds, Prometheus' base unit, are shown."""
    key = encode_delta("lorazor_probe_microseconds_total", {})
    make_logger({"lorazor": {}}).record(make_stats({key: 1_500_000}), None)
    assert registry.get_sample_value("lorazor_probe_seconds_total") == pytest.approx(1.5)
    assert registry.get_sample_value("lorazor_probe_microseconds_total") is None


def test_release_step_is_a_histogram(registry: Any) -> None:
    """Each delta is that many observations of its step."""
    labels = {"adapter": "sql", "task": "wikisql"}
    deltas = {encode_delta("lorazor_release_step", {**labels, "step": str(step)}): n for step, n in ((3, 2), (10, 1))}
    make_logger({"lorazor": {}}).record(make_stats(deltas), None)
    assert registry.get_sample_value("lorazor_release_step_count", labels) == 3
    assert registry.get_sample_value("lorazor_release_step_sum", labels) == 16
    assert registry.get_sample_value("lorazor_release_step_bucket", {**labels, "le": "3.0"}) == 2


def test_task_names_of_clients_cannot_fill_the_memory(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit, new task names are counted together; known ones go on."""
    monkeypatch.setattr(metrics, "MAX_TASKS", 3)
    logger = make_logger({"lorazor": {}})
    for task in [f"task{i}" for i in range(10)] + ["task0"]:
        logger.record(make_stats({encode_delta("lorazor_releases_total", {**LABELS, "task": task}): 1}), None)
    counts = {
        task: registry.get_sample_value("lorazor_releases_total", {**LABELS, "task": task})
        for task in ("task0", "task2", "task3", metrics.OTHER_TASK)
    }
    assert counts == {"task0": 2, "task2": 1, "task3": None, metrics.OTHER_TASK: 7}


@pytest.mark.parametrize("config", [{}, {"other": 1}, None, object()])
def test_inert_unless_asked_for(registry: Any, config: object) -> None:
    """Without the key in additional_config no metric appears and the statistics are not touched."""
    entries = {"stock-adapter": 1, encode_delta("lorazor_rows", {}): 7}
    stats = make_stats(entries)
    make_logger(config).record(stats, None)
    assert stats.running_lora_adapters == entries
    assert list(registry.collect()) == []


def test_nothing_to_record(registry: Any) -> None:
    """Iterations without scheduler statistics, or without our entries, change nothing."""
    logger = make_logger({"lorazor": {}})
    logger.record(None, None)
    logger.record(make_stats({"stock-adapter": 1}), None)
    logger.log_engine_initialized()
    assert registry.get_sample_value("lorazor_rows_total") == 0


def test_vllm_finds_the_logger() -> None:
    """The entry point of the installed package gives vLLM this class."""
    from vllm.v1.metrics.loggers import load_stat_logger_plugin_factories

    assert LoRazorStatLogger in load_stat_logger_plugin_factories()


def test_queries_in_the_docs_name_metrics_that_exist(registry: Any) -> None:
    """Whoever copies one into a dashboard gets numbers."""
    from prometheus_client import generate_latest

    make_logger({"lorazor": {}})
    shown = re.findall(r"^# TYPE (lorazor_\w+)", generate_latest(registry).decode(), re.MULTILINE)
    asked = re.findall(r"(lorazor_\w+)[\[{]", DOCS.read_text(encoding="utf-8"))
    assert len(asked) > 5
    assert set(asked) <= set(shown)
