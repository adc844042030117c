"""policy.json: what a policy artifact says about itself, as types that refuse anything else."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from lorazor.features.errors import InputError

POLICY_FILE = "policy.json"
MODEL_FILE = "model.txt"
FORMAT_VERSION: Literal[2] = 2
MAX_THRESHOLDS = 50
"""Upper bound on a task's threshold grid: every threshold tested costs data, so the grid is kept short."""

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
RequestHash = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]
Unit = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Guarantee(_Part):
    """What `tune` promises for one threshold: with `confidence`, the loss is at most `max_drop` on such requests."""

    kind: Literal["relative", "net", "absolute", "signed"]
    """relative: E max(0, S - R) <= max_drop · E S; absolute: E max(0, S - R) <= max_drop; net and signed: the same of
    S - R."""
    max_drop: Unit
    confidence: Unit
    n: int = Field(ge=1)
    """Calibration requests."""
    loss: Number | None = None
    """Mean loss that the calibration requests showed."""
    bound: Number | None = None
    """The upper confidence bound on that loss."""
    p_value: Unit | None = None
    active_row_share: Number | None = None
    length_ratio: Number | None = None


class TaskPolicy(_Part):
    """The operating point of one task; threshold None = never release."""

    threshold: Unit | None = None
    mean_output_tokens: float = Field(gt=0.0, allow_inf_nan=False)
    """Of the never-released training traces; the feature `step_over_mean` divides by it."""
    guarantee: Guarantee | None = None
    """None: the threshold was set by hand, by a target share, or not at all."""


class AdapterEntry(_Part):
    """An adapter that the policy was trained on; the fingerprint is its identity and the name only a label."""

    name: str = Field(min_length=1)
    fingerprint: Sha256
    task: str | None = None


class Manifest(_Part):
    """The whole of policy.json."""

    format_version: Literal[2] = FORMAT_VERSION
    schema_hash: Sha256
    features: list[str] = Field(min_length=1)
    probe_interval: int = Field(ge=1)
    probes: bool = True
    """False: its model looks at no probe, so a server makes none; it decides at the same steps. No new format version:
    a LoRazor that does not know the field refuses it by name, and every policy from before it has probes."""
    base_fingerprint: Sha256
    adapters: list[AdapterEntry]
    tasks: dict[str, TaskPolicy]
    threshold_grid: dict[str, Annotated[list[Unit], Field(max_length=MAX_THRESHOLDS)]] = {}
    """By task. Fixed at training, before any calibration data are read: quantiles of the scores of unseen requests."""
    trained_on: list[RequestHash] = []
    """First 16 hex digits of the sha256 of each request id that the model learnt from, to refuse an overlap."""
    made: dict[str, JsonValue] = {}
    """How it was made: command, versions, data digest, metrics."""
    sha256: dict[FileName, Sha256] = {}
    """Hash of every other file of the artifact; filled in when it is saved."""

    @model_validator(mode="after")
    def _refers_to_what_it_has(self) -> "Manifest":
        for entry in self.adapters:
            if entry.task is not None and entry.task not in self.tasks:
                raise ValueError(f"adapter {entry.name!r} has the task {entry.task!r}, which is not in tasks")
        prints = [entry.fingerprint for entry in self.adapters]
        if len(set(prints)) < len(prints):
            raise ValueError("two adapters have the same fingerprint")
        return self


def parse_manifest(data: bytes, path: Path) -> Manifest:
    """The manifest in `data`, the content of `path`.

    Raises:
        InputError: damaged JSON, another format version, an unknown or missing key, or a value out of its range.
    """
    try:
        return Manifest.model_validate_json(data, strict=True)
    except ValidationError as error:
        raise InputError(f"{path}: {_sentence(error)}") from None


def _sentence(error: ValidationError) -> str:
    """The first thing wrong: field, rule, value."""
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"]) or POLICY_FILE
    if first["type"] == "json_invalid":
        return f"not readable as JSON ({first['msg']})"
    if first["type"] == "extra_forbidden":
        return f"unknown field {field}"
    if field == "format_version":
        return f"format_version is {_shown(first['input'])}, this LoRazor reads version {FORMAT_VERSION}: train again"
    return f"field {field}: {first['msg']}, got {_shown(first['input'])}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
