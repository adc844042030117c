"""Signals of decode steps, windows over a request's past, and the ordered feature schema; no vLLM in here."""

from lorazor.features.errors import InputError
from lorazor.features.grid import boundary, decision_steps, is_decision_step, release_grid, release_step
from lorazor.features.offline import Decisions, decision_features
from lorazor.features.schema import FEATURES, SCHEMA_HASH
from lorazor.features.signals import ADAPTER_SIGNALS, PROBE_SIGNALS, adapter_signals, probe_signals
from lorazor.features.window import Window

__all__ = [
    "ADAPTER_SIGNALS",
    "FEATURES",
    "PROBE_SIGNALS",
    "SCHEMA_HASH",
    "Decisions",
    "InputError",
    "Window",
    "adapter_signals",
    "boundary",
    "decision_features",
    "decision_steps",
    "is_decision_step",
    "probe_signals",
    "release_grid",
    "release_step",
]
