"""The kernels' wrapper in an engine, on a CPU by the kernels' reference: mapping, releases and probes end to end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lorazor.runtime.punica_gpu import KernelPunica
from tests.runtime.tiny import Ask, Reference, Tiny, assert_text, counts, engine, prompt, run, tokens, worker

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(torch.cuda.is_available(), reason="on CUDA, test_gpu_kernels.py does this with the kernels"),
]


@pytest.fixture(scope="module")
def llm(tiny: Tiny) -> Iterator[Any]:
    """An engine that records with g = 4, its LoRA layers on the wrapper that CUDA uses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lorazor.runtime.active_loras.kernels_fit", lambda manager: True)
        yield engine(tiny, {"record": True, "probe_interval": 4}, max_loras=3)


def test_mixed_batches_have_the_references_texts(llm: Any, tiny: Tiny, reference: Reference) -> None:
    """Three adapters of three ranks, releases, probed rows and rows without an adapter: each has its own text."""
    releases = (1, 3, 9, "never", None, 14)
    asks = [Ask(prompt(k, 8 + 9 * k), "abc"[k % 3], r, tokens=24) for k, r in enumerate(releases)]
    asks += [Ask(prompt(90, 20)), Ask(prompt(91, 70), "c", "never", tokens=30)]
    for ask, output in zip(asks, run(llm, tiny, asks), strict=True):
        assert_text(tokens(output), reference, ask)
    assert sum(counts(llm, "lorazor_probes_total").values()) > 0
    (wrapper,) = worker(llm).model_runner.lora_manager._adapter_manager.punica_wrapper_mapping.values()
    assert type(wrapper) is KernelPunica
    assert wrapper.tokens.launches > 0
    assert sorted(wrapper.tokens.ranks.tolist()) == [4, 8, 16]


def test_all_rows_released(llm: Any, tiny: Tiny, reference: Reference) -> None:
    """Steps in which nobody is active any more, between steps in which somebody is."""
    for release in (1, 5, None):
        asks = [Ask(prompt(40 + k, 12), "ab"[k], release, tokens=20) for k in range(2)]
        for ask, output in zip(asks, run(llm, tiny, asks), strict=True):
            assert_text(tokens(output), reference, ask)
