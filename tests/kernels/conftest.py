"""The device that the kernels run on: Triton's interpreter on the CPU, or a GPU where there is one."""

from __future__ import annotations

import contextlib
import importlib
import os

import pytest
import torch

MODULES = [
    f"lorazor.kernels.{name}"
    for name in ("build_tiles", "shrink", "expand", "signals", "probe_signals", "forest", "window", "place_shadows")
]
LAZY = "triton.experimental.gluon"  # newer Tritons import it at the first launch, and it reads the variable too


def _interpret() -> str:
    """Make Triton interpret; returns why it cannot, or nothing. Triton reads the variable when it is imported."""
    if torch.cuda.is_available():
        return "the kernels are compiled for the GPU here"
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        modules = [importlib.import_module(name) for name in MODULES]
        with contextlib.suppress(ImportError):
            importlib.import_module(LAZY)
    except ImportError as error:
        return f"no Triton here: {error}"
    finally:  # not for the engines that later tests start
        if before is None:
            del os.environ["TRITON_INTERPRET"]
    functions = modules[0]._build_tiles_kernel, importlib.import_module("triton.language").max
    interpreted = all(type(function).__name__ == "InterpretedFunction" for function in functions)
    return "" if interpreted else "Triton was imported before it could be told to interpret"


WHY_NOT_CPU = _interpret()


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """`cpu`: interpreted. `cuda`: compiled."""
    name = str(request.param)
    if name == "cpu" and WHY_NOT_CPU:
        pytest.skip(WHY_NOT_CPU)
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return name
