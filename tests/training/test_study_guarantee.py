"""The guarantee stage against planted truth: what it counts is right, and it would notice a promise that is broken."""

from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from lorazor.training.losses import LOOSEST_BUDGET, Kind, observed, p_values
from lorazor.training.ltt import fixed_sequence, keep
from lorazor.training.pvalues import Floats
from lorazor.training.study.cli import main
from lorazor.training.study.guarantee import kept_thresholds, verdict
from lorazor.training.study.layout import Cell
from tests.planted import LONG_PROMPT, Population
from tests.training.study_folder import plant

POOL, N, DRAWS = 4000, 600, 200

KINDS: list[Kind] = ["relative", "net"]


@pytest.fixture(scope="module")
def pool() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A planted population of scores and outcomes at 20 thresholds."""
    return Population().draw(POOL, seed=5)


@pytest.fixture(scope="module")
def drawn() -> np.ndarray:
    """Calibration sets drawn with replacement."""
    return np.random.default_rng(1).integers(0, POOL, (DRAWS, N))


def just_broken(kind: Kind, never: np.ndarray, released: np.ndarray) -> float:
    """A max-drop that one threshold breaks by a hair: the hardest place."""
    truth = [observed(kind, never, column) or 0.0 for column in released.T]
    return next(loss for loss in truth if loss > 0.05) * 0.999


def alone(kind: Kind, never: Floats, released: Floats, some: slice, level: float) -> Floats:
    """The p-values of one draw, as `tune` has them."""
    return p_values(kind, never, released[:, some], 0.05, level)[None]


@pytest.mark.parametrize("kind", KINDS)
def test_draws_keep_what_tune_would(pool: tuple[np.ndarray, ...], drawn: np.ndarray, kind: Kind) -> None:
    """All draws at once give what each draw alone gives."""
    never, released, _ = pool
    kept = kept_thresholds(never, released, drawn[:5], kind, 0.05, 0.9)
    for row, index in zip(drawn[:5], kept, strict=True):
        p_of = partial(alone, kind, never[row], released[row])
        (one,) = keep(p_of, released.shape[1], 1 - 0.9, LOOSEST_BUDGET.get(kind, 0.0))
        assert index == (-1 if one.index is None else one.index)


@pytest.mark.parametrize("kind", KINDS)
def test_the_promise_holds_at_the_hardest_place(pool: tuple[np.ndarray, ...], drawn: np.ndarray, kind: Kind) -> None:
    """At most 10 % of the draws break it within binomial error, and some come near."""
    never, released, share = pool
    max_drop = just_broken(kind, never, released)
    kept = kept_thresholds(never, released, drawn, kind, max_drop, 0.9)
    found = verdict(kept, never, released, share.mean(axis=0), kind, max_drop, 0.9)
    assert found["p_value"] > 0.001
    assert found["broken"] > 0
    assert found["never"] < DRAWS / 10
    assert found["worst_true_loss"] > max_drop >= found["mean_true_loss"]
    assert 0 < found["active_row_share"] < 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_promise_is_noticed(pool: tuple[np.ndarray, ...], drawn: np.ndarray, kind: Kind) -> None:
    """Thresholds kept by their observed loss alone break it far too often, and the verdict says so."""
    never, released, share = pool
    max_drop = just_broken(kind, never, released)
    naive = []
    for row in drawn:
        losses = np.array([observed(kind, never[row], column) or 0.0 for column in released[row].T])
        last = fixed_sequence(np.where(losses <= max_drop, 0.0, 1.0), 0.1)
        naive.append(-1 if last is None else last)
    found = verdict(np.array(naive), never, released, share.mean(axis=0), kind, max_drop, 0.9)
    assert found["p_value"] < 0.001


@pytest.mark.parametrize("kind", KINDS)
def test_a_grid_without_thresholds_never_releases(pool: tuple[np.ndarray, ...], drawn: np.ndarray, kind: Kind) -> None:
    """Nothing is broken by never."""
    never, released, _ = pool
    kept = kept_thresholds(never, released[:, :0], drawn, kind, 0.05, 0.9)
    found = verdict(kept, never, released[:, :0], np.empty(0), kind, 0.05, 0.9)
    assert (found["never"], found["broken"], found["active_row_share"]) == (DRAWS, 0, 1.0)


def test_the_stage_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows per max-drop and for drift; a cell without a policy is told, and a second run does nothing."""
    plant(tmp_path, Cell("tiny", "sql", "ordinary"), noise=1.5)
    plant(tmp_path, Cell("tiny", "chat", "ordinary"), kind="unsafe")
    command = ["guarantee", "--out", str(tmp_path), "--draws", "40", "--max-drop", "0.05", "--max-drop", "0.1"]
    assert main(command) == 0
    assert "left out: task 'chat': every label is 'unsafe'" in " ".join(capsys.readouterr().err.split())
    table = pd.read_csv(tmp_path / "guarantee.csv")
    assert list(table["max_drop"]) == [0.05, 0.1] * 2
    assert list(table["loss_kind"]) == ["relative"] * 2 + ["net"] * 2
    assert (table["pool"] == 1000).all()
    assert (table["n"] == 700).all()
    assert (table["p_value"] > 0.001).all()
    drift = pd.read_csv(tmp_path / "drift.csv").query("loss_kind == 'net'")
    assert set(drift["served"]) == {"short", "long"}
    assert set(drift["by"]) == {"prompt tokens", "output tokens"}
    by_prompt = drift[(drift["by"] == "prompt tokens") & (drift["max_drop"] == 0.05)].set_index("served")
    assert by_prompt["n"].sum() == 300
    assert float(by_prompt["cut"]["short"]) < LONG_PROMPT
    before = (tmp_path / "guarantee.csv").read_bytes()
    assert main(command) == 0
    assert (tmp_path / "guarantee.csv").read_bytes() == before
