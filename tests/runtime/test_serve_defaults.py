"""Defaults of `lorazor serve`: only what the user left open is set, and every setting is said."""

from __future__ import annotations

import os
from argparse import Namespace
from typing import Any

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

from lorazor.runtime.serve_defaults import set_defaults  # noqa: E402


def make_args(**given: Any) -> Namespace:
    """What vLLM's parser leaves when the user said nothing, but for `given`."""
    nothing = {
        "enable_lora": False,
        "max_loras": None,
        "max_cpu_loras": None,
        "max_lora_rank": None,
        "dtype": "auto",
        "kv_cache_memory_bytes": None,
        "tensor_parallel_size": 1,
        "data_parallel_size": 1,
        "enforce_eager": False,
    }
    return Namespace(**{**nothing, **given})


@pytest.fixture(params=["cpu", "cuda"])
def platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """vLLM's platform, and an environment in which the user set nothing."""
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: request.param == "cpu")
    for name in ("VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_USE_V2_MODEL_RUNNER"):
        monkeypatch.setenv(name, "")  # so that monkeypatch puts back what set_defaults writes
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 1})
    return str(request.param)


@pytest.mark.usefixtures("platform")
def test_lora_defaults_follow_the_adapters() -> None:
    """LoRA goes on, every adapter up to eight gets a slot, and the rank limit is vLLM's next larger one."""
    args = make_args()
    lines = list(set_defaults(args, adapters=3, rank=24))
    assert (args.enable_lora, args.max_loras, args.max_lora_rank) == (True, 3, 32)
    assert sum("--max" in line or "--enable-lora" in line for line in lines) == 3
    args = make_args()
    list(set_defaults(args, adapters=100, rank=4))
    assert (args.max_loras, args.max_lora_rank) == (8, 16)


@pytest.mark.usefixtures("platform")
def test_the_users_lora_settings_stay() -> None:
    """One slot and a small rank limit are the user's right, and without adapters LoRA is not turned on."""
    args = make_args(max_loras=1, max_lora_rank=8)
    list(set_defaults(args, adapters=3, rank=24))
    assert (args.max_loras, args.max_lora_rank) == (1, 8)
    args = make_args()
    list(set_defaults(args, adapters=0, rank=0))
    assert (args.enable_lora, args.max_loras, args.max_lora_rank) == (False, 1, 16)


@pytest.mark.usefixtures("platform")
def test_adapters_beside_the_slots_stay_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, as far as a quarter of the free memory holds them; the user's word stays."""
    monkeypatch.setattr("lorazor.runtime.serve_defaults._available_memory", lambda: 4000)
    for given, adapters, size, held in (
        ({}, 20, 10, 20),
        ({}, 20, 0, 20),
        ({}, 200, 10, 100),
        ({"tensor_parallel_size": 2}, 200, 10, 50),
        ({}, 20, 500, None),
        ({}, 8, 10, None),
        ({"max_cpu_loras": 9}, 20, 10, 9),
    ):
        args = make_args(**given)
        lines = list(set_defaults(args, adapters, rank=8, size=size))
        assert args.max_cpu_loras == held
        said = [f"set --max-cpu-loras {held}, for {adapters} adapters on 8 slots"]
        assert [line for line in lines if "cpu-loras" in line] == (
            said if held and not given.get("max_cpu_loras") else []
        )


def test_platform_defaults(platform: str) -> None:
    """On a CPU: float32, a bounded cache, all of few cores. On CUDA vLLM's own choices, model runner V2 among them."""
    args = make_args()
    lines = list(set_defaults(args, adapters=0, rank=0))
    if platform == "cpu":
        assert args.dtype == "float32"
        assert 0 < args.kv_cache_memory_bytes <= 4 << 30
        assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "1,3"
        assert len(lines) == 3
    else:
        assert (args.dtype, args.enforce_eager, "VLLM_USE_V2_MODEL_RUNNER" in os.environ) == ("auto", False, False)
        assert not lines


def test_the_users_platform_settings_stay(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags and variables that the user set are not touched, and nothing is said."""
    for name in ("VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_USE_V2_MODEL_RUNNER"):
        monkeypatch.setenv(name, "1")
    args = make_args(dtype="bfloat16", enforce_eager=True)
    assert list(set_defaults(args, adapters=0, rank=0)) == []
    assert (args.dtype, args.kv_cache_memory_bytes) == ("bfloat16", None)


def test_many_cores_or_workers_are_left_to_vllm(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own binding is kept on a large machine and with several workers."""
    list(set_defaults(make_args(tensor_parallel_size=2), adapters=0, rank=0))
    assert "VLLM_CPU_OMP_THREADS_BIND" not in os.environ
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    list(set_defaults(make_args(), adapters=0, rank=0))
    assert "VLLM_CPU_OMP_THREADS_BIND" not in os.environ
