"""The captured graph of a step: the launches' own bits over any lists, and no call that waits for the GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lorazor.features.grid import is_decision_step_of_each
from lorazor.policy.artifact import Artifact
from tests.runtime.test_device_policy import G, admitted, artifact, core_of, unprobed  # noqa: F401 (fixtures)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

MOST, VOCAB, STEPS = 96, 5000, 3 * G + 2


def course(artifact: Artifact, graphs: bool, seed: int, check: bool = False) -> list[torch.Tensor]:  # noqa: F811
    """What each of some steps sends home: other rows in each, in another order, with other pairs, none included.

    With `check`, a call that waits for the device is an error from the second step on.
    """
    from lorazor.runtime.device_step import DeviceStep, start_device_policy
    from lorazor.runtime.step_plan import StepPlan

    rng, core, home = np.random.default_rng(seed), core_of(artifact, MOST), []
    step = DeviceStep(MOST, torch.zeros(1, VOCAB, dtype=torch.bfloat16, device="cuda"), core.probes)
    policy = start_device_policy(core, step)
    assert step.graphs
    if not graphs:
        step.graphs = {}
    ids = [f"r{k}" for k in range(MOST // 2)]
    for request_id in ids:
        core.admit(admitted(request_id, 1.0))
    assert core.followed is not None
    made = np.zeros(len(ids), np.int64)
    for c in range(STEPS):
        n = int(rng.integers(1, len(ids) + 1))
        rows = rng.permutation(len(ids))[:n]
        probed = rng.permutation(n)[: int(rng.integers(0, n + 1)) * (c % 2) * core.probes]
        logits = torch.from_numpy(rng.normal(size=(n + len(probed), VOCAB)) * 3).to("cuda", torch.bfloat16)
        tokens = torch.from_numpy(rng.integers(0, VOCAB, n)).to("cuda")
        windows = core.followed.windows(core.followed.places([ids[k] for k in rows]), made[rows])
        due = np.sort(probed) if core.probes else np.flatnonzero(is_decision_step_of_each(made[rows], G))
        made[rows] += 1
        pairs = [(int(k), n + j) for j, k in enumerate(probed)]
        torch.cuda.set_sync_debug_mode("error" if check and c else "default")
        try:
            found = step.run(step.keep(logits), tokens, StepPlan(range(n), pairs, windows), policy=policy)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        assert len(found) == (bool(pairs) or not core.probes)
        assert all(np.array_equal(np.flatnonzero(~scores.isnan()), due) for scores in found)
        home += [scores.clone() for scores in found]
    return home


@pytest.mark.parametrize("policy", ["artifact", "unprobed"])
@pytest.mark.parametrize("seed", range(5))
def test_a_graph_gives_the_launches_bits(request: pytest.FixtureRequest, policy: str, seed: int) -> None:
    """Scores to the last bit, NaN in the same rows."""
    artifact = request.getfixturevalue(policy)  # noqa: F811
    one, other = course(artifact, True, seed), course(artifact, False, seed)
    assert len(one) == len(other) > 0
    for scores, wanted in zip(one, other, strict=True):
        torch.testing.assert_close(scores, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("policy", ["artifact", "unprobed"])
@pytest.mark.parametrize("graphs", [True, False])
def test_a_step_waits_for_nothing(request: pytest.FixtureRequest, policy: str, graphs: bool) -> None:
    """Lists, logits, graph or launches, and the way home: no call synchronises."""
    course(request.getfixturevalue(policy), graphs, 0, check=True)
