"""What `--additional-config '{"lorazor": {...}}'` may hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lorazor.features.errors import InputError


class RuntimeConfig(BaseModel):
    """The runtime's settings; an empty object turns on the active-row kernels and forced releases."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy: str | None = Field(None, description="policy artifact: a folder, or models:/name@alias")
    release_fraction: float = Field(
        1.0, ge=0, le=1, description="share of requests, by hash of the id, that may release"
    )
    pinned: tuple[str, ...] = Field((), description="adapters, by served name, that are never released")
    record: bool = Field(False, description="keep the signals of never-released requests for `lorazor collect`")
    probe_interval: int | None = Field(None, ge=1, description="g while recording; a policy brings its own")
    policy_timeout: float = Field(1.0, gt=0, description="seconds that one call of the policy may take")

    @model_validator(mode="after")
    def _recording_needs_an_interval(self) -> RuntimeConfig:
        if self.record and (self.probe_interval is None or self.policy is not None):
            raise ValueError("record needs probe_interval, and no policy beside it")
        if self.probe_interval is not None and not self.record:
            raise ValueError("probe_interval is for record; a policy brings its own")
        return self


def runtime_config(additional_config: Mapping[str, Any] | None) -> RuntimeConfig | None:
    """Our part of vLLM's additional_config, or None where LoRazor is not asked for.

    Raises:
        InputError: an unknown key or a value outside its rule.
    """
    ours = (additional_config or {}).get("lorazor") if isinstance(additional_config, Mapping) else None
    if ours is None:
        return None
    try:
        return RuntimeConfig.model_validate(ours)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(("lorazor", *map(str, first["loc"])))
        raise InputError(f"additional_config: {where}: {first['msg']}, got {first['input']!r}") from None
