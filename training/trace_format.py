"""The columns and the `meta.json` of the trace format (design.md's tables), as pyarrow schemas and pydantic models."""

from __future__ import annotations

from typing import Any, Literal

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field

from lorazor.features.signals import ADAPTER_SIGNALS, PROBE_SIGNALS

FORMAT_VERSION = 1
STEPS, ROLLOUTS, META = "steps", "rollouts", "meta.json"
Mode = Literal["adapter", "released", "base"]
MODES: tuple[Mode, ...] = ("adapter", "released", "base")

STRING, INT, FLOAT, BOOL = pa.string(), pa.int32(), pa.float32(), pa.bool_()
SIGNAL_COLUMNS = (*ADAPTER_SIGNALS, *PROBE_SIGNALS)
"""Columns of `steps` that may be dropped from a shipped table: they read back as missing."""

STEP_COLUMNS = pa.schema(
    [
        ("request_id", STRING),
        ("task", STRING),
        ("adapter", STRING),
        ("step", INT),
        ("token_id", INT),
        ("prompt_tokens", INT),
        ("max_tokens", INT),
        *((name, FLOAT) for name in ADAPTER_SIGNALS),
        ("probed", BOOL),
        *((name, BOOL if name == "base_top1_agrees" else FLOAT) for name in PROBE_SIGNALS),
    ]
)
ROLLOUT_COLUMNS = pa.schema(
    [
        ("request_id", STRING),
        ("task", STRING),
        ("adapter", STRING),
        ("mode", STRING),
        ("release_step", INT),  # null unless mode is "released"
        ("score", FLOAT),
        ("output_tokens", INT),
        ("finish_reason", STRING),
        ("same_text", BOOL),
        # True: even when repeated, its first r tokens were not the trace's (numerics), so it is left out and counted.
        ("differs", BOOL),
        # Null unless the collection keeps texts, and where it is the never-released one.
        ("text", STRING),
    ]
)
OPTIONAL_COLUMNS = frozenset({*SIGNAL_COLUMNS, "differs", "text"})


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelInfo(_Strict):
    """A base model: a label, and the sha256 of its weights and configuration."""

    name: str
    fingerprint: str


class AdapterInfo(ModelInfo):
    """An adapter and the task that it was collected for."""

    task: str


class TaskInfo(_Strict):
    """How a task's requests were sampled and scored."""

    max_tokens: int = Field(gt=0)
    sampling: dict[str, Any] = {}
    scorer: str


class Noise(_Strict):
    """Never released against never released under another batch size: how far numerics alone move a score."""

    n: int = Field(ge=0)
    differing: int = Field(ge=0)
    mean_abs_diff: float = Field(ge=0, le=1)


class Meta(_Strict):
    """`meta.json`: what the traces were made from."""

    format_version: int = FORMAT_VERSION
    base: ModelInfo
    adapters: list[AdapterInfo]
    probe_interval: int = Field(gt=0)
    tasks: dict[str, TaskInfo]
    sampling: dict[str, Any] = {}
    versions: dict[str, str] = {}
    command: str = "unknown"
    greedy: bool = True
    noise: dict[str, Noise] = {}
