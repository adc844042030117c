"""Two ranks decide alike: one of them, and the other one follows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lorazor.policy.artifact import load_artifact
from lorazor.runtime import ranks
from lorazor.runtime.config import RuntimeConfig
from lorazor.runtime.core import ReleaseCore
from lorazor.runtime.core_values import Admitted, Sampled
from lorazor.runtime.step_news import StepNews
from tests.runtime.policies import make_policy, safe_from_step
from tests.runtime.tiny import ON_V2, Ask, Reference, Tiny, assert_text, engine, prompt, released_at, run, tokens

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def policy(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Releases at the first decision step from 6 on: c = 8, so r = 10."""
    return make_policy(Path(tmp_path_factory.mktemp("policy")) / "artifact", tiny, safe_from_step(6))


@pytest.mark.slow
@pytest.mark.skipif(ON_V2 and not torch.cuda.is_available(), reason="its workers would have no interpreter")
@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks_give_the_text_of_one(tiny: Tiny, reference: Reference, policy: str) -> None:
    """Forced releases, the policy's, and none; three adapters take turns on two slots and come back."""
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "max_cpu_loras": 3}
    llm = engine(tiny, {"policy": policy}, **options)
    wanted = {None: 10, "never": None, 1: 1, 5: 5}
    for turn in range(2):
        asks = [Ask(prompt(9 * turn + k, 8 + 5 * k), "ab"[k % 2], list(wanted)[k % 4]) for k in range(8)]
        asks += [Ask(prompt(60 + k, 9), (None, "c")[k]) for k in range(2)]
        outputs = run(llm, tiny, asks)
        for ask, output in zip(asks, outputs, strict=True):
            release = wanted[ask.release] if ask.adapter in ("a", "b") else None
            assert_text(tokens(output), reference, Ask(ask.prompt, ask.adapter, release))
            if ask.adapter is not None:
                assert released_at(output) == release
    statuses = llm.collective_rpc("lorazor_status")
    probes, other = ({name: n for name, _, n in s["counts"]}.get("lorazor_probes_total", 0) for s in statuses)
    assert probes == other > 0
    swaps = [{labels["way"]: n for name, labels, n in s["counts"] if name == "lorazor_swaps_total"} for s in statuses]
    assert all(sum(ways.values()) > ways["stock"] for ways in swaps)  # each rank has images of its own shards


def asked(tiny: Tiny, request_id: str, **extra: Any) -> Admitted:
    """A request of adapter a."""
    from lorazor.policy.fingerprint import fingerprint

    return Admitted(request_id, "a", fingerprint(tiny.adapters["a"]), prompt_tokens=5, max_tokens=50, extra_args=extra)


@pytest.fixture
def cores(tiny: Tiny, policy: str) -> tuple[ReleaseCore, ReleaseCore]:
    """The core of the rank that decides, and of one that does not, which has less room for requests."""
    config = RuntimeConfig.model_validate({"policy": policy})
    first, second = (
        ReleaseCore(config, load_artifact(policy), 8 if decides else 1, decides) for decides in (True, False)
    )
    return first, second


def test_admission_goes_from_rank_to_rank(
    tiny: Tiny, cores: tuple[ReleaseCore, ReleaseCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that does not decide has no boundary of its own until it is told, in the same step."""
    second = cores[1]
    for core in cores:
        core.admit(asked(tiny, "r1", lorazor_threshold=0.0))
        core.admit(asked(tiny, "r2", lorazor_release=4))
        core.admit(asked(tiny, "r3"))
    assert [second.boundary(i) for i in ("r1", "r2", "r3")] == [None] * 3
    sent: list[Any] = []

    def broadcast(found: Any) -> Any:
        sent.append(found)
        return sent[0]

    monkeypatch.setattr(ranks, "get_tp_group", lambda: SimpleNamespace(world_size=2, broadcast_object=broadcast))
    for core in cores:
        ranks.agree_on_admissions(core, ["r1", "r2", "r3"])
    assert sent == [({"r1": 1, "r2": 4}, ["r3"]), None]
    for request_id, position in (("r1", 5), ("r2", 8), ("r3", None)):
        assert [core.boundary(request_id) for core in cores] == [position] * 2
        assert [core.wants_probe(request_id, 8) for core in cores] == [position is None] * 2


def test_later_decisions_come_with_a_step(tiny: Tiny, cores: tuple[ReleaseCore, ReleaseCore]) -> None:
    """A release and a lost request stop being probed when every rank is told, not before; strangers are let pass."""
    first, second = cores
    for core in cores:
        for request_id in ("r1", "r2"):
            core.admit(asked(tiny, request_id))
    second.take_in_admissions(first.admissions(["r1", "r2"]))
    first.give_up(["r2"])
    for c in range(9):
        signals, probes = torch.zeros(1, 4), torch.zeros(1, 5)
        first.observe(Sampled(["r1"], np.array([c]), torch.tensor([7]), signals, probes))
    step = first.take_step()
    assert (step.released, step.given_up) == ({"r1": 10}, ["r2"])
    assert all(core.wants_probe(i, 12) for core in cores for i in ("r1", "r2"))
    for core in cores:
        news = StepNews({**step.released, "gone": 3}, step.given_up)
        ranks.take_in_decisions(core, SimpleNamespace(lorazor=news))
        ranks.take_in_decisions(core, SimpleNamespace())
        assert core.boundary("r1") == 5 + 10 - 1
        assert not any(core.wants_probe(i, 12) for i in ("r1", "r2"))
