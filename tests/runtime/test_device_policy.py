"""The policy on the device: the host's decisions, LightGBM's scores, offline features, and no wait."""

# ruff: noqa: F811 (`device` is a fixture, borrowed from the tests of the kernels)

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.conftest import device  # noqa: F401 (before vLLM, which imports Triton)

# isort: split
from lorazor.features import signals as reference
from lorazor.features.grid import is_decision_step
from lorazor.features.offline import decision_features
from lorazor.features.schema import FEATURES, SCHEMA_HASH
from lorazor.policy.artifact import Artifact, save_artifact
from lorazor.policy.manifest import AdapterEntry, Manifest, TaskPolicy
from lorazor.runtime.config import runtime_config
from lorazor.runtime.core import ReleaseCore
from lorazor.runtime.core_values import Admitted, Sampled
from lorazor.runtime.counters import FAILURES
from lorazor.runtime.scoring import Followed
from tests.policy.conftest import train as train_policy
from tests.runtime.policies import make_policy, safe_from, safe_from_step
from tests.runtime.tiny import ON_V2, Ask, Tiny, engine, prompt, released_at, run, worker

VOCAB, MOST, G = 300, 8, 3
PRINT = "0" * 64
# NumPy, which interprets, warns of what missing values are made of.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A small model of the real schema, which releases about every second time it is asked."""
    return saved(tmp_path_factory, str(train_policy(rounds=20).model_to_string()), probes=True)


@pytest.fixture(scope="module")
def unprobed(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Without probes: it releases where a step's own entropy is high."""
    return saved(tmp_path_factory, safe_from("entropy", np.linspace(0, 6, 500), 5.0), probes=False)


def saved(tmp_path_factory: pytest.TempPathFactory, model: str, probes: bool) -> Artifact:
    """An artifact in a folder of its own."""
    manifest = Manifest(
        schema_hash=SCHEMA_HASH,
        features=list(FEATURES),
        probe_interval=G,
        probes=probes,
        base_fingerprint=PRINT,
        adapters=[AdapterEntry(name="a", fingerprint=PRINT, task="t")],
        tasks={"t": TaskPolicy(threshold=0.5, mean_output_tokens=20.5)},
    )
    folder = Path(tmp_path_factory.mktemp("policy")) / "artifact"
    return save_artifact(folder, manifest, model)


def core_of(artifact: Artifact, capacity: int = MOST) -> ReleaseCore:
    """A core without an engine."""
    config = runtime_config({"lorazor": {"policy": str(artifact.path), "policy_timeout": 5.0}})
    assert config is not None
    return ReleaseCore(config, artifact, capacity)


def admitted(request_id: str, threshold: float = 0.5) -> Admitted:
    """A new request of the adapter that the policy knows."""
    extra = {"lorazor_threshold": threshold}
    return Admitted(request_id, "a", PRINT, prompt_tokens=9, max_tokens=40, extra_args=extra)


def core_with(artifact: Artifact, thresholds: dict[str, float], capacity: int = MOST) -> ReleaseCore:
    """A core in which requests with these thresholds have begun."""
    core = core_of(artifact, capacity)
    for request_id, threshold in thresholds.items():
        core.admit(admitted(request_id, threshold))
    return core


def step_of(core: Any, device: str) -> tuple[Any, Any]:
    """Its step and its policy on the device."""
    from lorazor.runtime.device_step import DeviceStep, start_device_policy

    step = DeviceStep(MOST, torch.zeros(1, VOCAB, device=device), core.probes)
    policy = start_device_policy(core, step)
    assert policy is not None
    return step, policy


def plan_of(followed: Followed | None, ids: list[str], steps: list[int], pairs: list[tuple[int, int]]) -> Any:
    """The plan of a step whose rows are all listed."""
    from lorazor.runtime.step_plan import StepPlan

    assert followed is not None
    return StepPlan(range(len(ids)), pairs, followed.windows(followed.places(ids), np.array(steps)))


def draw_logits(rng: np.random.Generator, n: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A step's logits, the base's for as many rows, and tokens."""
    x = rng.normal(size=(n, VOCAB)) * 3
    y = x + rng.normal(size=x.shape)
    tokens = torch.from_numpy(rng.integers(0, VOCAB, n))
    return *(torch.tensor(v, dtype=torch.float32, device=device) for v in (x, y)), tokens.to(device)  # type: ignore[return-value]


def settle(device: str) -> None:
    """Wait until everything is home."""
    if device == "cuda":
        torch.cuda.synchronize()


def home(numbers: tuple[torch.Tensor, ...], device: str) -> list[torch.Tensor]:
    """A step's numbers when they are there, kept from the steps after it, which write where they lie."""
    settle(device)
    return [x.clone() for x in numbers]


@pytest.mark.parametrize("apart", [False, True])
def test_signals_are_those_of_torch(device: str, apart: bool) -> None:
    """Listed rows and pairs in any order, the base's rows apart or behind the others; the rest is NaN."""
    from lorazor.runtime.device_step import DeviceStep
    from lorazor.runtime.step_plan import StepPlan

    x, y, tokens = draw_logits(np.random.default_rng(0), 5, device)
    step = DeviceStep(MOST, x)
    step.start(None)
    lists = [([4, 0, 3], [(3, 0), (4, 2)]), ([1], []), ([2, 0, 1, 3, 4], [(0, 1)])]
    for listed, pairs in lists * 2:  # once more than there is memory for: what was there is overwritten
        own = [(row, base + 5 * (not apart)) for row, base in pairs]
        kept = step.keep(x if apart else torch.cat([x, y[:3]]))
        found = step.run(kept, tokens, StepPlan(listed, own), y[:3] if apart and pairs else None)
        settle(device)
        signals, probes = found
        rows, bases = [row for row, _ in pairs], [base for _, base in pairs]
        wanted = torch.full((5, 4), math.nan)
        wanted[listed] = reference.adapter_signals(x, tokens).cpu()[listed]
        torch.testing.assert_close(signals, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)
        wanted = torch.full((5, 5), math.nan)
        if pairs:
            wanted[rows] = reference.probe_signals(x[rows], y[bases], tokens[rows]).cpu()
        torch.testing.assert_close(probes, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_logits_of_another_kind(device: str) -> None:
    """Where a model's logits are not what its configuration says, there is room for them all the same."""
    from lorazor.runtime.device_step import DeviceStep
    from lorazor.runtime.step_plan import StepPlan

    x, _, tokens = draw_logits(np.random.default_rng(0), 5, device)
    step = DeviceStep(MOST, torch.zeros(1, 7, dtype=torch.bfloat16, device=device))
    step.start(None)
    signals, _ = step.run(step.keep(x), tokens, StepPlan(range(5)))
    settle(device)
    torch.testing.assert_close(signals, reference.adapter_signals(x, tokens).cpu(), rtol=1e-5, atol=1e-5)


@settings(max_examples=12)
@given(seed=st.integers(0, 2**32))
def test_any_course_of_events(artifact: Artifact, device: str, seed: int) -> None:
    """Admissions, ends, places used again, steps made again, rows unprobed or not followed, in any order of the batch:
    features have offline's bits, and scores are LightGBM's."""
    from lorazor.kernels import forest

    rng = np.random.default_rng(seed)
    followed = Followed(artifact, 4, 5.0, lambda why: None)
    _, policy = step_of(SimpleNamespace(artifact=artifact, followed=followed, probes=True), device)
    live: dict[str, int] = {}
    past: dict[str, list[torch.Tensor]] = {}
    found: dict[tuple[str, int], tuple[torch.Tensor, float]] = {}
    for t in range(20):
        if len(live) < 6 and rng.random() < 0.5 and followed.start(f"r{t}", "t", t, 40):
            live[f"r{t}"], past[f"r{t}"] = 0, []
        for gone in [i for i in live if rng.random() < 0.08]:
            followed.stop(gone)
            del live[gone]
        ids = rng.permutation([*live, "stranger"]).tolist()
        again = {i: c > 0 and rng.random() < 0.2 for i, c in live.items()}
        steps = [live[i] - again[i] if i in live else t for i in ids]
        x, y = (torch.tensor(rng.normal(size=(len(ids), width)), dtype=torch.float32) for width in (4, 5))
        x[rng.random(x.shape) < 0.1], y[:, 2], y[rng.random(len(ids)) < 0.5] = math.nan, 1.0, math.nan
        windows = torch.from_numpy(followed.windows(followed.places(ids), np.array(steps))).to(device)
        features, due = policy.push(x.to(device), y.to(device), windows)
        scores = forest.score(policy._trees, features, rows=due)
        for k, (i, c) in enumerate(zip(ids, steps, strict=True)):
            counts = i in live and not again[i]
            assert int(due[k]) == (k if counts and not y[k].isnan().all() else -1)
            if counts:
                past[i].append(torch.cat([x[k], y[k]]))
                live[i] += 1
            if int(due[k]) >= 0:
                found[i, c] = features[k].to("cpu", copy=True), float(scores[k])
    for i, rows in past.items():
        check_offline(artifact, {c: v for (j, c), v in found.items() if j == i}, rows, prompt_tokens=int(i[1:]))


def check_offline(
    artifact: Artifact, found: dict[int, tuple[torch.Tensor, float]], rows: list[torch.Tensor], prompt_tokens: int
) -> None:
    """Each step's features and score are what the recorded steps give."""
    padded = torch.stack([*rows, *[torch.full((9,), math.nan)] * 2]).numpy()
    wanted = decision_features(padded[:, :4], padded[:, 4:], [len(padded)], prompt_tokens, 40, 20.5, 1)
    for c, (features, score) in found.items():
        if c > 0:  # 0 is admission there
            row = wanted.features[wanted.step == c]
            np.testing.assert_array_equal(features.numpy(), row[0])
            assert score == pytest.approx(artifact.scorer.score(row)[0], abs=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_the_hosts_decisions(artifact: Artifact, device: str, seed: int) -> None:
    """The same requests give the same releases, broken logits and missing probes included; a request over capacity and
    one without a score keep their adapters, counted."""
    rng = np.random.default_rng(seed)
    thresholds = {f"r{k}": 0.2 + 0.1 * k for k in range(MOST)}
    host, on_device = (core_with(artifact, thresholds, MOST - 1) for _ in range(2))
    step, policy = step_of(on_device, device)
    ids = list(thresholds)
    for c in range(16):
        x, y, tokens = draw_logits(rng, MOST, device)
        x[2], y[3, 5] = math.nan, math.inf
        due = [k for k, i in enumerate(ids) if on_device.wants_probe(i, c) and (k, c) != (0, 1)]
        plan = plan_of(on_device.followed, ids, [c] * MOST, [(k, j) for j, k in enumerate(due)])
        kept, base = step.keep(x), y[due] if due else None
        signals, probes = step.run(kept, tokens, plan, base)
        found = step.run(kept, tokens, plan, base, policy)
        settle(device)
        assert len(found) == bool(due)
        on_device.observe_scores(ids, np.full(MOST, c), {ids[k]: float(found[0][k]) for k in due})
        host.observe(Sampled(ids, np.full(MOST, c), tokens.cpu(), signals, probes))
        assert on_device.take_step().released == host.take_step().released
    reasons = [
        {labels["reason"] for name, labels, _ in core.counters.totals() if name == FAILURES}
        for core in (host, on_device)
    ]
    assert reasons == [{"capacity", "missing_probe"}, {"capacity", "missing_probe", "nan"}]
    assert host.rule.released("r2") is None
    assert any(host.rule.released(i) for i in ids)


def test_the_hosts_decisions_without_probes(unprobed: Artifact, device: str) -> None:
    """Every decision step has scores, no other step and no step made again has; broken logits count as missing."""
    rng = np.random.default_rng(0)
    thresholds = {f"r{k}": 0.3 + 0.08 * k for k in range(MOST)}
    host, on_device = (core_with(unprobed, thresholds) for _ in range(2))
    step, policy = step_of(on_device, device)
    ids = list(thresholds)
    for c in range(16):
        x, _, tokens = draw_logits(rng, MOST, device)
        x *= torch.tensor(rng.uniform(0.05, 2.0, (MOST, 1)), dtype=x.dtype, device=device)  # not always as sure
        x[2] = math.nan
        plan, steps = plan_of(on_device.followed, ids, [c] * MOST, []), np.full(MOST, c)
        followed = [i in on_device.followed for i in ids]  # type: ignore[operator]
        kept = step.keep(x)
        signals, probes = home(step.run(kept, tokens, plan), device)
        (found,) = home(step.run(kept, tokens, plan, policy=policy), device)
        (again,) = home(step.run(kept, tokens, plan, policy=policy), device)
        assert again.isnan().all()
        assert (~found.isnan()).tolist() == [known and is_decision_step(c, G) for known in followed]
        on_device.observe_scores(ids, steps, {i: float(found[k]) for k, i in enumerate(ids) if followed[k]})
        host.observe(Sampled(ids, steps, tokens.cpu(), signals, probes))
        assert on_device.take_step().released == host.take_step().released
        assert not any(on_device.wants_probe(i, c) for i in ids)
    assert not any(name == FAILURES for core in (host, on_device) for name, _, _ in core.counters.totals())
    assert len({host.rule.released(i) for i in ids}) > 2


def test_a_policy_that_does_not_fit_stays_on_the_host(
    artifact: Artifact,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever stops it from starting on the device, the server starts."""
    from lorazor.runtime.device_step import DeviceStep, start_device_policy

    monkeypatch.setattr("lorazor.kernels.forest.MOST_NODES", 1)
    step = DeviceStep(MOST, torch.zeros(1, VOCAB, device=device))
    assert start_device_policy(core_of(artifact), step) is None


@pytest.mark.vllm
@pytest.mark.skipif(not ON_V2, reason="on model runner V2")
def test_an_engine_decides_alike_on_both(tiny: Tiny, tmp_path: Path) -> None:
    """The device decides at once; told to, the host decides for the same requests, and the same."""
    policy = make_policy(tmp_path / "artifact", tiny, safe_from_step(6))
    llm = engine(tiny, {"policy": policy, "policy_timeout": 5.0}, max_loras=3, max_num_seqs=3)
    asks = [Ask(prompt(k, 7 + 5 * k), "ab"[k % 2], tokens=14 + k) for k in range(5)]
    runner = worker(llm).model_runner
    assert runner.device_policy is not None
    first = run(llm, tiny, asks)
    runner.device_policy = None
    second = run(llm, tiny, asks)
    assert [released_at(output) for output in first] == [10] * 5
    assert [released_at(output) for output in second] == [10] * 5
    assert [o.outputs[0].token_ids for o in first] == [o.outputs[0].token_ids for o in second]
