"""Fixtures for tests on real vLLM with a tiny random model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# On CUDA vLLM's float32 attention would multiply in TF32, which is too coarse for what is compared here.
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
if os.environ.get("LORAZOR_TEST_RUNNER", "").startswith("v2"):
    from tests.runtime.v2_on_cpu import prepare

    prepare(asynchronous=os.environ["LORAZOR_TEST_RUNNER"] == "v2-async")
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")

from tests.runtime.policies import safe_from_step, save_policy
from tests.runtime.tiny import Reference, Tiny, make_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """The base and three adapters, of different ranks."""
    return make_tiny(Path(tmp_path_factory.mktemp("tiny")), {"a": 8, "b": 16, "c": 4})


@pytest.fixture(scope="session")
def reference(tiny: Tiny) -> Reference:
    """The plain transformers + PEFT loop."""
    return Reference(tiny)


@pytest.fixture(scope="session")
def probed_policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a policy with probes, of no model in particular."""
    folder = Path(tmp_path_factory.mktemp("probed")) / "artifact"
    return str(save_policy(folder, safe_from_step(8), "0" * 64, {}).path)
