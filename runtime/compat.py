"""Which vLLM this runs on, and the questions that differ between the supported versions."""

from __future__ import annotations

import importlib.util

from lorazor.features.errors import InputError

SUPPORTED = ("0.26.0", "0.27.1")


def vllm_version() -> str:
    """vLLM's version without its build tag, for example 0.27.1 for 0.27.1+cpu.

    Raises:
        InputError: vLLM is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise InputError("vLLM is not installed: pip install 'lorazor[cpu]' or 'lorazor[gpu]'")
    from vllm.version import __version__

    return str(__version__).partition("+")[0]


def require_supported_vllm() -> None:
    """Refuse a vLLM whose internals these hooks were never run against.

    Raises:
        InputError: the version is not one of SUPPORTED.
    """
    version = vllm_version()
    if version not in SUPPORTED:
        raise InputError(f"vLLM {version} is not supported: LoRazor runs on {' and '.join(SUPPORTED)}")
