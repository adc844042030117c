"""The adapter that a training goes on from: any plain LoRA of the base, with its own rank, alpha and targets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftModel

from lorazor.features.errors import InputError

SHAPE = ("rank", "alpha", "targets")
PLAIN = (".lora_A.", ".lora_B.")  # what the boundary's mask lets go of; embeddings, biases and magnitudes it does not


def with_shape_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of FinetuneConfig, completed by what `init` brings, if it is among them.

    Raises:
        InputError: the folder is no LoRA adapter, or something that it brings is given as well.
    """
    init = options.get("init")
    if init is None:
        return dict(options)
    for name in SHAPE:
        if name in options:
            raise InputError(f"--init brings the adapter's own {name}: leave out --{name} {_words(options[name])}")
    try:
        found = LoraConfig.from_pretrained(init)
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"--init {init}: no LoRA adapter: {error}") from None
    if not isinstance(found, LoraConfig):  # PEFT reads a configuration of whatever kind it is
        raise InputError(f"--init {init}: no LoRA adapter: its peft_type is {found.peft_type.value}")
    targets = found.target_modules or ()
    brought = {"rank": found.r, "alpha": found.lora_alpha}
    return {**options, **brought, "targets": (targets,) if isinstance(targets, str) else tuple(sorted(targets))}


def load_init(base: Any, init: Path) -> Any:
    """A PEFT model of `base` whose adapter is the one in `init`, in float32, ready to be trained.

    Raises:
        InputError: it does not fit the base, or it is more than plain LoRA.
    """
    try:
        model = PeftModel.from_pretrained(base, init, is_trainable=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"--init {init} does not fit the base: {' '.join(str(error).split())[:300]}") from None
    for name, weight in model.named_parameters():
        if weight.requires_grad and not any(part in name for part in PLAIN):
            raise InputError(f"--init {init} is no plain LoRA: {name} could not be let go")
    return model


def _words(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
