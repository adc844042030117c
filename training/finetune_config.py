"""What `lorazor finetune` is asked to do, checked before anything expensive starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from lorazor.features.errors import InputError
from lorazor.training.config import Strict, describe
from lorazor.training.finetune_cuts import Cut, Cuts
from lorazor.training.finetune_init import with_shape_of

ALL_LINEAR = "all-linear"


class FinetuneConfig(Strict):
    """Data, adapter, optimisation and cut of one run; the defaults are those of the command."""

    model: Path
    data: tuple[Path, ...] = Field(min_length=1)
    init: Path | None = None
    validation: Path | None = None
    validation_share: float = Field(default=0.05, ge=0, lt=1)
    cut: Cut = Cut.RELEASE_AWARE
    prompt_share: float = Field(default=0.5, ge=0, le=1)
    uniform_share: float = Field(default=0.3, ge=0, le=1)
    distill: float = Field(default=0.0, ge=0)
    own_outputs: float = Field(default=0.0, ge=0, le=1)
    refresh: int = Field(default=200, ge=1)
    rank: int = Field(default=16, ge=1)
    alpha: float | None = Field(default=None, gt=0)
    targets: tuple[str, ...] = Field(default=(ALL_LINEAR,), min_length=1)
    lr: float = Field(default=5e-4, gt=0)
    epochs: float = Field(default=3.0, gt=0)
    steps: int | None = Field(default=None, ge=1)
    batch: int = Field(default=16, ge=1)
    accumulate: int = Field(default=1, ge=1)
    max_length: int = Field(default=1024, ge=2)
    group_by_length: bool = False
    bf16: bool = False
    gradient_checkpointing: bool = False
    compile: bool = False
    seed: int = Field(default=0, ge=0)
    eval_every: int = Field(default=100, ge=1)
    patience: int = Field(default=5, ge=0)
    select_on: Literal["loss", "exact"] = "loss"
    base_name: str | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> FinetuneConfig:
        total = self.prompt_share + self.uniform_share
        if total > 1 + 1e-9:
            raise ValueError(f"prompt_share and uniform_share must make at most 1 together, got {total:g}")
        if self.distill and self.cut is not Cut.RELEASE_AWARE:
            raise ValueError(f"distill needs the cut release-aware, got {self.cut.value}")
        if self.compile and self.own_outputs:
            raise ValueError(
                f"compile is for training alone: own_outputs must be 0 beside it, got {self.own_outputs:g}"
            )
        return self

    @property
    def cuts(self) -> Cuts:
        """How training draws release steps."""
        return Cuts(self.cut, self.prompt_share, self.uniform_share)

    @property
    def lora_alpha(self) -> float:
        """The adapter's scale is alpha / rank; 2 unless told otherwise."""
        return 2.0 * self.rank if self.alpha is None else self.alpha

    @property
    def base(self) -> str:
        """The base's name in the adapter's files."""
        return self.base_name or str(self.model)

    def recipe(self) -> dict[str, Any]:
        """Everything that decides the weights, without a path: a run may be moved and resumed elsewhere."""
        return self.model_dump(mode="json", exclude={"model", "data", "init", "validation", "base_name"})


def finetune_config(**options: Any) -> FinetuneConfig:
    """The configuration of these options, None standing for what is not given; `init` brings the adapter's shape.

    Raises:
        InputError: names the first option that is wrong, with its rule and value.
    """
    given = with_shape_of({name: value for name, value in options.items() if value is not None})
    try:
        return FinetuneConfig(**given)
    except ValidationError as error:
        raise InputError(f"finetune: {describe(error)}") from None
