"""What the adapter that a training goes on from (`init`) brings: its own rank, alpha and targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peft import LoraConfig

from lorazor.features.errors import InputError

SHAPE = ("rank", "alpha", "targets")


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


def _words(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
