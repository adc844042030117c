"""Engines on the active-row kernels, on a GPU in half precision: both model runners, eager and in CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from lorazor.features.grid import is_decision_step
from lorazor.features.signals import PROBE_SIGNALS, probe_signals
from tests.runtime.engine_process import run_apart
from tests.runtime.tiny import Ask, Reference, Tiny, assert_text, prompt

pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.slow]

V1, V2 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}, {"VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_GPU_SYNC_CHECK": "error"}
GRAPHS = {"enforce_eager": False, "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]}}

# Three adapters of ranks 8, 16 and 4 on two slots; rows without one; prompts of several chunks; then nobody; then one.
MIXED = [Ask(prompt(k, 8 + 9 * k), ("a", "b", "c", None)[k % 4]) for k in range(12)]
NOBODY = [Ask(prompt(20 + k, 10)) for k in range(3)]
ALONE = [Ask(prompt(30, 10), "c", tokens=40)]
AGAIN = [Ask(prompt(40 + k, 12), "cab"[k % 3], tokens=30) for k in range(9)]
BATCHES = [MIXED, NOBODY, ALONE, AGAIN]


@pytest.fixture(scope="module", autouse=True)
def _needs_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def assert_texts(texts: Sequence[Sequence[Sequence[int]]], batches: Sequence[Sequence[Ask]], ref: Reference) -> None:
    """Every text is the float32 reference's up to a near tie, and texts rarely part at one."""
    same = total = 0
    for asks, batch in zip(batches, texts, strict=True):
        for ask, got in zip(asks, batch, strict=True):
            assert_text(got, ref, ask)
            release = ask.release if isinstance(ask.release, int) else None
            wanted = ref.text(ask.prompt, ask.adapter, release, ask.tokens)
            same += next((k for k, pair in enumerate(zip(got, wanted, strict=True)) if pair[0] != pair[1]), len(got))
            total += len(got)
    assert same > total / 2, (same, total)


@pytest.mark.parametrize(("dtype", "options"), [("bfloat16", GRAPHS), ("float16", {"enforce_eager": True})])
def test_v2_with_nobody_released(dtype: str, options: dict[str, Any], tiny: Tiny, reference: Reference) -> None:
    """Asynchronous steps, in full and piecewise graphs or eager, wait for the GPU nowhere and have the right texts."""
    texts, facts = run_apart(tiny, {}, BATCHES, V2, dtype=dtype, **options)
    assert_texts(texts, BATCHES, reference)
    assert (facts["runner"], facts["lora_state"]) == ("ReleaseRunner", "ReleasableLoraState")
    assert facts["wrappers"] == ["KernelPunica"]
    assert facts["launches"] > 0
    assert facts["async_scheduling"]
    assert ("FULL" in facts["graphs"]) == (options is GRAPHS)
    assert set(facts["ranks"][0]) <= {4, 8, 16}


@pytest.mark.parametrize(("environment", "runner"), [(V1, "LoRazorRunner"), (V2, "ReleaseRunner")])
@pytest.mark.parametrize("options", [GRAPHS, {"enforce_eager": True}])
def test_releases_and_probes(
    environment: dict[str, str], runner: str, options: dict[str, Any], tiny: Tiny, reference: Reference
) -> None:
    """Releases, rows that are probed every fourth step, and steps in which everybody is released."""
    releases = (1, 3, 9, "never", 14, "never")
    mixed = [Ask(prompt(k, 8 + 9 * k), "ab"[k % 2], releases[k % 6]) for k in range(12)] + NOBODY
    released = [Ask(prompt(50 + k, 12), "ab"[k], 2, tokens=20) for k in range(2)]
    batches = [mixed, released, ALONE]
    recording = {"record": True, "probe_interval": 4}
    texts, facts = run_apart(tiny, recording, batches, environment, dtype="bfloat16", **options)
    assert_texts(texts, batches, reference)
    assert facts["runner"] == runner
    assert facts["wrappers"] == ["KernelPunica"]
    assert ("FULL" in facts["graphs"]) == (options is GRAPHS)
    counted = {name: n for name, _, n in facts["counts"]}
    assert counted["lorazor_probes_total"] > 0
    assert "lorazor_policy_failures_total" not in counted
    assert_probes(facts["traces"], [ask for ask in mixed if ask.release == "never"], reference)


def assert_probes(traces: Sequence[dict[str, Any]], asks: Sequence[Ask], reference: Reference) -> None:
    """Where a text is the reference's to the end, so is the divergence of every probe, up to half precision."""
    place, compared = PROBE_SIGNALS.index("kl"), 0
    for ask in asks:
        assert ask.adapter is not None
        own = reference.decode(ask.prompt, ask.adapter, None, ask.tokens)
        found = [t for t in traces if t["tokens"] == [token for token, _ in own]]
        if not found:
            continue
        base = reference.base_logits_beside(ask.prompt, ask.adapter, ask.tokens)
        for c in filter(lambda c: is_decision_step(c, 4), range(1, ask.tokens)):
            wanted = probe_signals(own[c][1][None], base[c - 1][None], torch.tensor([own[c][0]]))[0, place]
            np.testing.assert_allclose(found[0]["probes"][c][place], float(wanted), rtol=0.2, atol=0.05)
            compared += 1
    assert compared
