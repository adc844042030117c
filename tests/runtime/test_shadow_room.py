"""How an engine is widened for shadow rows, and what of it the scheduler may use."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lorazor.runtime.shadow_room import leave_room, make_room, scratch_bytes, shadow_rows, with_scratch
from tests.runtime.policies import safe_from_step, save_policy


def config(most: int, sizes: list[int] | None = None, v2: bool = True) -> Any:
    """A vLLM configuration with what `make_room` reads."""
    return SimpleNamespace(
        additional_config={"lorazor": {"policy": "p"}},
        use_v2_model_runner=v2,
        scheduler_config=SimpleNamespace(max_num_seqs=most, max_num_batched_tokens=8192),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=max(sizes or [0])),
    )


@pytest.mark.parametrize(("most", "rows"), [(1, 1), (20, 20), (128, 128), (1024, 128)])
def test_widened_once(probed_policy: str, most: int, rows: int) -> None:
    """A second call, as in the engine's process, changes nothing; the caller's own settings stay as they are."""
    made = config(most)
    settings = made.additional_config
    for _ in range(2):
        make_room(made, probed_policy)
        assert shadow_rows(made) == rows
        assert made.scheduler_config.max_num_seqs == most + rows
        assert made.scheduler_config.max_num_batched_tokens == 8192 + rows
    assert settings == {"lorazor": {"policy": "p"}}


def test_not_on_v1(probed_policy: str) -> None:
    """There a probe is no row."""
    made = config(16, [1, 2, 4, 8, 16], v2=False)
    make_room(made, probed_policy)
    assert (made, shadow_rows(made)) == (config(16, [1, 2, 4, 8, 16], v2=False), 0)


def test_not_without_probes(tmp_path: Path) -> None:
    """A policy without probes leaves the engine as it is, and is looked at once."""
    policy = save_policy(tmp_path / "policy", safe_from_step(8), "0" * 64, {}, probes=False).path
    made = config(16, [1, 2, 4, 8, 16])
    make_room(made, str(policy))
    shutil.rmtree(policy)
    make_room(made, str(policy))
    before = config(16, [1, 2, 4, 8, 16])
    assert shadow_rows(made) == 0
    assert (made.scheduler_config, made.compilation_config) == (before.scheduler_config, before.compilation_config)


@pytest.mark.parametrize(
    ("most", "sizes", "wanted"),
    [
        (16, [1, 16, 32], [1, 16, 32]),  # vLLM's own reach twice as far
        (16, [1, 16], [1, 16, 24, 32]),
        (512, [256, 512], [256, 512, *range(520, 641, 8)]),
        (512, [256], [256]),  # a full batch ran outside graphs before
        (512, [], []),  # no graphs
    ],
)
def test_graphs_reach_a_full_batch_with_its_shadows(
    probed_policy: str, most: int, sizes: list[int], wanted: list[int]
) -> None:
    """Sizes are added only where a full batch would fall out of its graph."""
    made = config(most, sizes)
    make_room(made, probed_policy)
    assert made.compilation_config.cudagraph_capture_sizes == wanted
    assert made.compilation_config.max_cudagraph_capture_size == max(wanted, default=0)


@pytest.mark.parametrize(("asked", "wanted"), [(8224, 8192), (100, 100)])
def test_the_scheduler_is_held_to_the_users_limits(probed_policy: str, asked: int, wanted: int) -> None:
    """To the tokens of a step, or to fewer where the user said so; without room, nothing changes."""
    made = config(128)
    make_room(made, probed_policy)
    built = SimpleNamespace(
        vllm_config=made,
        scheduler_config=made.scheduler_config,
        max_num_running_reqs=160,
        max_num_scheduled_tokens=asked,
    )
    leave_room(built)
    assert (built.max_num_running_reqs, built.max_num_scheduled_tokens) == (128, wanted)


def test_scratch_blocks_lie_behind_the_schedulers() -> None:
    """Each layer's tensor grows by whole blocks, in a copy, and by as many bytes as were kept free."""
    tensors = [SimpleNamespace(size=100 * page) for page in (64, 64, 256)]
    cache = SimpleNamespace(num_blocks=100, kv_cache_tensors=tensors)
    grown = with_scratch(cache, 4)
    assert (cache.num_blocks, grown.num_blocks) == (100, 104)
    assert [t.size for t in grown.kv_cache_tensors] == [104 * 64, 104 * 64, 104 * 256]
    specs = {str(k): SimpleNamespace(page_size_bytes=t.size // 100) for k, t in enumerate(tensors)}
    assert sum(t.size for t in grown.kv_cache_tensors) - sum(t.size for t in tensors) == scratch_bytes(specs, 4)
