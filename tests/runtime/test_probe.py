"""The probe's base logits against transformers over a copy of the same cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lorazor.features.grid import is_decision_step
from lorazor.features.signals import probe_signals
from tests.runtime.tiny import Ask, Reference, Tiny, assert_text, engine, prompt, run, tokens

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def recorder(tiny: Tiny) -> Any:
    """An engine that records with g = 4."""
    return engine(tiny, {"record": True, "probe_interval": 4})


def test_probes_are_the_bases_logits_over_the_adapters_cache(recorder: Any, tiny: Tiny, reference: Reference) -> None:
    """KL, agreement and base log-probabilities of every probed row equal those of the reference loop."""
    asks = [Ask(prompt(k, 10 + k), "ab"[k % 2], "never") for k in range(6)] + [Ask(prompt(9, 12))]
    outputs = run(recorder, tiny, asks)
    traces = recorder.collective_rpc("lorazor_traces", args=(None,))[0]
    assert len(traces) == 6
    for ask, output in zip(asks[:6], outputs, strict=False):
        (trace,) = [t for i, t in traces.items() if list(t["token_ids"]) == tokens(output)]
        assert ask.adapter is not None
        own = [logits for _, logits in reference.decode(ask.prompt, ask.adapter, None, ask.tokens)]
        base = reference.base_logits_beside(ask.prompt, ask.adapter, ask.tokens)
        for c in range(1, ask.tokens):
            got = trace["probes"][c]
            assert bool(np.isnan(got).all()) != is_decision_step(c, 4)
            if is_decision_step(c, 4):
                token = torch.tensor([trace["token_ids"][c]]).long()
                want = probe_signals(own[c][None], base[c - 1][None], token)[0].numpy()
                np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)


def test_probing_changes_no_token(recorder: Any, tiny: Tiny, reference: Reference) -> None:
    """A probed request has the reference's text: the adapter's pass overwrites the probe's keys and values."""
    ask = Ask(prompt(20, 21), "b", "never", tokens=40)
    (output,) = run(recorder, tiny, [ask])
    assert_text(tokens(output), reference, ask)


def test_traces_are_forgotten_once_taken(recorder: Any, tiny: Tiny) -> None:
    """A second call returns nothing; a request that is not told to stay is not recorded."""
    recorder.collective_rpc("lorazor_traces", args=(None,))
    run(recorder, tiny, [Ask(prompt(1, 8), "a", "never"), Ask(prompt(2, 8), "a", 3), Ask(prompt(3, 8), "a")])
    assert len(recorder.collective_rpc("lorazor_traces", args=(None,))[0]) == 1
    assert recorder.collective_rpc("lorazor_traces", args=(None,))[0] == {}
