"""The fused window against `features.Window`: any signals, places that change hands, steps that are made again."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lorazor.features.grid import is_decision_step
from lorazor.features.schema import FEATURES
from lorazor.features.window import Window
from tests.kernels.cases import EXAMPLES

NAN = math.nan
REQUEST = (33.0, 97.0, 41.7)
# NumPy, which interprets, warns of what missing values are made of.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


class Fused:
    """The kernel over memory full of rubbish."""

    def __init__(self, capacity: int, device: str, interval: int | None = None) -> None:
        from lorazor.kernels import window

        self.kernel, self.device, self.interval = window, device, interval
        self.state = torch.full((capacity, window.STATE), 7.0, device=device)
        self.owners = torch.full((capacity,), -1, dtype=torch.int32, device=device)

    def push(
        self, x: torch.Tensor, y: torch.Tensor, places: list[int], serials: list[int], steps: list[int]
    ) -> tuple[torch.Tensor, list[int]]:
        """Features on the CPU, and the rows that are due."""
        lists = [torch.tensor(v, dtype=torch.int32, device=self.device) for v in (places, serials, steps)]
        lists.append(torch.tensor(REQUEST, device=self.device)[:, None].repeat(1, len(x)))
        values = x.to(self.device), y.to(self.device)
        features, due = self.kernel.push(self.state, self.owners, *values, *lists, interval=self.interval)
        return features.cpu(), due.tolist()


def draw(rng: np.random.Generator, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Signals and probes of a step: of every size, with gaps, infinities and rows that were not probed."""
    x, y = (rng.normal(size=(n, width)) * 10.0 ** rng.integers(-6, 3, (n, width)) for width in (4, 5))
    y[:, 2] = y[:, 2] > 0
    for values in (x, y):
        values[rng.random(values.shape) < 0.1] = rng.choice([np.nan, np.inf, -np.inf])
    y[rng.random(n) < 0.5] = np.nan
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal to the last bit, NaN in the same places."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@settings(deadline=None, max_examples=EXAMPLES // 2)
@given(st.integers(0, 2**32), st.integers(1, 40))
def test_features_are_the_windows_to_the_last_bit(device: str, seed: int, n: int) -> None:
    """Ten steps of one request or of more than a program takes."""
    rng = np.random.default_rng(seed)
    fused, window, rows = Fused(64, device), Window(n), torch.arange(n)
    window.reset(rows, *REQUEST)
    places, serials = rng.permutation(64)[:n].tolist(), rng.permutation(n).tolist()
    for c in range(10):
        x, y = draw(rng, n)
        window.push(rows, x, y)
        features, due = fused.push(x, y, places, serials, [c] * n)
        same(features, window.features(rows))
        assert due == [k if probed else -1 for k, probed in enumerate((~y.isnan().all(1)).tolist())]


@pytest.mark.parametrize("interval", [1, 3, 16])
def test_without_probes_decision_steps_are_due(device: str, interval: int) -> None:
    """Of a step that is taken in, probed or not; features are the same."""
    rng = np.random.default_rng(0)
    fused, probed = Fused(2, device, interval), Fused(2, device)
    for c in range(34):
        x, y = draw(rng, 2)
        features, due = fused.push(x, y, [1, -1], [0, 0], [c, c])
        assert due == [0 if is_decision_step(c, interval) else -1, -1]
        same(features[:1], probed.push(x, y, [1, -1], [0, 0], [c, c])[0][:1])
        assert fused.push(x, y, [1, -1], [0, 0], [c, c])[1] == [-1, -1]


def test_only_the_next_step_is_taken_in(device: str) -> None:
    """A step made again, one after a gap, a prompt's middle and nobody's row change nothing and are not due."""
    rng = np.random.default_rng(0)
    fused = Fused(3, device)
    for c in range(3):
        fused.push(*draw(rng, 1), [2], [5], [c])
    before, (x, _) = fused.state.clone(), draw(rng, 4)
    # The first column asks three times at once, which is fine while none of them writes.
    _, due = fused.push(x, torch.ones(4, 5), [2, 2, 2, -1], [5, 5, 5, -1], [2, 4, -3, 0])
    assert due == [-1] * 4
    same(fused.state, before)
    assert fused.push(x[:1], torch.ones(1, 5), [2], [5], [3])[1] == [0]


def test_a_place_that_changes_hands_starts_anew(device: str) -> None:
    """The next owner has a fresh window from c = 0, and none before; other places are left alone."""
    rng = np.random.default_rng(1)
    fused, fresh = Fused(2, device), Fused(2, device)
    for c in range(4):
        fused.push(*draw(rng, 2), [0, 1], [0, 1], [c, c])
    neighbour, (x, y) = fused.state[1].clone(), draw(rng, 1)
    assert fused.push(x, torch.ones(1, 5), [0], [2], [4])[1] == [-1]
    for c in range(2):
        same(fused.push(x, y, [0], [2], [c])[0], fresh.push(x, y, [0], [0], [c])[0])
    same(fused.state[1], neighbour)


def test_no_rows_and_the_schemas_width(device: str) -> None:
    """An empty batch launches nothing, and the kernel knows as many features as the schema."""
    fused = Fused(2, device)
    assert fused.push(torch.empty(0, 4), torch.empty(0, 5), [], [], [])[0].shape == (0, len(FEATURES))


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from lorazor.kernels import window
integers = ("owners_ptr", "places_ptr", "serials_ptr", "steps_ptr", "due_ptr")
sizes = {name: getattr(window, name) for name in ("STATE", "FEATURES", "ROWS")} | {"INTERVAL": 16}
types = dict.fromkeys(integers, "*i32") | dict.fromkeys(("n_rows", "stride"), "i32") | dict.fromkeys(sizes, "constexpr")
signature = {name: types.get(name, "*fp32") for name in window._window_kernel.arg_names}
source = triton.compiler.ASTSource(window._window_kernel, signature, sizes)
options = {"num_warps": 1, "enable_fp_fusion": False}
print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])
"""


@pytest.mark.slow
def test_compiled_for_a_gpu_it_rounds_as_torch_does() -> None:
    """Without a GPU too: the kernel compiles, with no multiply-add, no quick division and no flush to zero."""
    pytest.importorskip("triton")
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "div.rn.f32" in done.stdout
    assert not any(word in done.stdout for word in ("fma", "div.full", "div.approx", ".ftz"))
