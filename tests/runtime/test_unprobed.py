"""A policy without probes: it decides at the same steps, from what the adapter's own steps show, and nothing is probed.

What it must do is foretold by replay, from traces that were recorded with probes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from lorazor.features.grid import release_step
from lorazor.features.offline import decision_features
from lorazor.features.schema import FEATURES
from lorazor.policy.artifact import Artifact, load_artifact
from lorazor.runtime.counters import FAILURES
from tests.runtime.policies import PROBE_INTERVAL, make_policy, safe_from
from tests.runtime.tiny import (
    ON_V2,
    OVERLAP,
    Ask,
    Reference,
    Tiny,
    assert_text,
    counts,
    engine,
    prompt,
    released_at,
    run,
    scheduler,
    tokens,
    watch_preemptions,
    worker,
)

pytestmark = pytest.mark.vllm

THRESHOLD, SEQUENCES, BLOCKS = 0.9, 8, 40
ASKS = [Ask(prompt(40 + k, 20 + 7 * k), "ab"[k % 2], tokens=40) for k in range(8)]


class Foretold:
    """Recorded, never-released requests, and a policy for them: safe at the highest averages of the entropy."""

    def __init__(self, tiny: Tiny, folder: Path) -> None:
        recorder = engine(tiny, {"record": True, "probe_interval": PROBE_INTERVAL})
        outputs = run(recorder, tiny, [replace(ask, release="never") for ask in ASKS])
        traces = recorder.collective_rpc("lorazor_traces", args=(None,))[0].values()
        self.features = [self._features(ask, tokens(o), traces) for ask, o in zip(ASKS, outputs, strict=True)]
        entropy = np.concatenate([x[1:, FEATURES.index("entropy_fast")] for _, x in self.features])
        model = safe_from("entropy_fast", entropy, float(np.quantile(entropy, 0.8)))
        self.policy = make_policy(folder / "artifact", tiny, model, THRESHOLD, probes=False)

    @staticmethod
    def _features(ask: Ask, text: list[int], traces: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Decision steps and what is known at each, the probes included."""
        (trace,) = [t for t in traces if t["token_ids"].tolist() == text]
        assert not np.isnan(trace["probes"]).all()
        request = [len(text)], len(ask.prompt), ask.tokens, 20.0
        found = decision_features(trace["signals"], trace["probes"], *request, PROBE_INTERVAL)
        return found.step, found.features

    def steps(self, artifact: Artifact) -> list[int | None]:
        """The release step of each request, by replay."""
        found = []
        for step, features in self.features:
            reached = np.flatnonzero(artifact.scorer.score(features) >= THRESHOLD)
            found.append(release_step(int(step[reached[0]])) if len(reached) else None)
        return found


@pytest.fixture(scope="module")
def foretold(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Foretold:
    """What replay says."""
    return Foretold(tiny, Path(tmp_path_factory.mktemp("unprobed")))


@pytest.fixture(scope="module")
def llm(tiny: Tiny, foretold: Foretold) -> Any:
    """An engine with the policy, whose blocks do not suffice for eight long requests at once."""
    lorazor = {"policy": foretold.policy, "policy_timeout": 5.0}
    return engine(tiny, lorazor, max_num_seqs=SEQUENCES, num_gpu_blocks_override=BLOCKS)


def check(llm: Any, outputs: list[Any], asks: list[Ask], wanted: list[int | None], reference: Reference) -> None:
    """Each request was released where it had to be, its text is the reference's, and nothing was probed or failed."""
    assert [released_at(output) for output in outputs] == wanted
    for output, ask, step in zip(outputs, asks, wanted, strict=True):
        assert_text(tokens(output), reference, replace(ask, release=step))
    assert sum(counts(llm, "lorazor_probes_total").values()) == 0
    assert counts(llm, FAILURES) == {}


def test_released_where_replay_says(llm: Any, tiny: Tiny, reference: Reference, foretold: Foretold) -> None:
    """At several steps, and not at all; where the device scores, the host then decides alike."""
    wanted = foretold.steps(load_artifact(foretold.policy))
    assert len({*wanted}) > 3
    assert None in wanted
    check(llm, run(llm, tiny, ASKS[:4]), ASKS[:4], wanted[:4], reference)
    check(llm, run(llm, tiny, ASKS[4:]), ASKS[4:], wanted[4:], reference)
    if ON_V2:
        runner = worker(llm).model_runner
        policy, runner.device_policy = runner.device_policy, None
        assert policy is not None
        check(llm, run(llm, tiny, ASKS[:4]), ASKS[:4], wanted[:4], reference)
        runner.device_policy = policy


def test_after_a_preemption(llm: Any, tiny: Tiny, reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed request decides on; where a step under way was dropped it may be later, and its text tells the step."""
    preempted = watch_preemptions(llm, monkeypatch)
    asks = [Ask(prompt(60 + k, 60 + k), "ab"[k % 2], tokens=60) for k in range(SEQUENCES)]
    outputs = run(llm, tiny, asks)
    assert len(preempted) >= 2
    assert sum(released_at(output) is not None for output in outputs) >= 2
    for output, ask in zip(outputs, asks, strict=True):
        assert_text(tokens(output), reference, replace(ask, release=released_at(output)))
    assert sum(counts(llm, "lorazor_probes_total").values()) == 0
    assert set(counts(llm, FAILURES)) <= ({"nan"} if OVERLAP else set())


def test_no_room_is_taken(llm: Any) -> None:
    """Rows, tokens and blocks are what was asked for, in the worker too; the status says that nothing is probed."""
    runner = worker(llm).model_runner
    assert scheduler(llm).max_num_running_reqs == SEQUENCES == runner.max_num_reqs
    assert scheduler(llm).max_num_scheduled_tokens == 64 == runner.max_num_tokens
    assert scheduler(llm).kv_cache_config.num_blocks == BLOCKS == runner.kv_cache_config.num_blocks
    assert not ON_V2 or runner._scratch is None
    (status,) = llm.collective_rpc("lorazor_status")
    assert (status["policy"]["probes"], status["policy"]["probe_interval"]) == (False, PROBE_INTERVAL)
