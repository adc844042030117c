"""Each rule of the trace format, broken once: the message names table, column, row and value."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from lorazor.features.errors import InputError
from lorazor.training.trace_checks import checked
from lorazor.training.traces import read_traces, write_traces
from tests.training.tiny_traces import tiny_meta, tiny_rollouts, tiny_steps

Change = Callable[[pd.DataFrame], pd.DataFrame]


def put(row: int, column: str, value: Any) -> Change:
    """A change of one cell."""

    def change(frame: pd.DataFrame) -> pd.DataFrame:
        frame = frame.copy()
        if value is None:
            frame[column] = frame[column].astype(object)
        frame.loc[row, column] = value
        return frame

    return change


STEP_RULES = [
    (lambda f: f.drop(index=3).reset_index(drop=True), "column step, row 3: steps of request 'a' must run 0, 1, 2"),
    (lambda f: pd.concat([f, f.iloc[[2]]], ignore_index=True), "column step, row 2|column step, row 17"),
    (put(9, "task", "math"), "column task, row 9: must be the same in every row of a request, is 'math'"),
    (put(9, "prompt_tokens", 8), "column prompt_tokens, row 9: must be the same in every row of a request, is 8"),
    (put(4, "probed", False), "column probed, row 4: must be true exactly at step 1 and .* of g = 4, is False"),
    (put(3, "probed", True), "column probed, row 3: must be true exactly"),
    (put(2, "kl", np.float32(0.5)), "column kl, row 2: must be null where probed is false, is 0.5"),
    (put(2, "base_top1_agrees", np.float32(1)), "column base_top1_agrees, row 2: must be null where probed is false"),
    (put(5, "top1_prob", np.float32(1.5)), r"column top1_prob, row 5: must be in \[0, 1.001\], is 1.5"),
    (put(5, "token_id", None), "column token_id, row 5: must not be null, is null"),
    (lambda f: f.assign(max_tokens=np.int32(6)), "column step, row 6: must be below max_tokens, is 6"),
    (lambda f: f.assign(task="math"), "column task, row 0: must be one of meta.json's"),
    (lambda f: f.assign(adapter="other"), "column adapter, row 0: must be one of meta.json's"),
]  # fmt: skip
ROLLOUT_RULES = [
    (put(1, "request_id", "zz"), "column request_id, row 1: must be a request of the steps table, is 'zz'"),
    (put(7, "task", "math"), "column task, row 7: must match the steps table, is 'math'"),
    (put(7, "mode", "other"), r"column mode, row 7: must be one of \['adapter', 'released', 'base'\], is 'other'"),
    (put(1, "release_step", 3), 'column release_step, row 1: must be null unless mode is "released", is 3'),
    (put(7, "release_step", pd.NA), "column release_step, row 7: must be 1 or more, is null"),
    (put(7, "release_step", 1), "column request_id, row 7: must be unique per mode and release_step, is 'a'"),
    (put(7, "score", np.float32(1.25)), r"column score, row 7: must be in \[0, 1\], is 1.25"),
    (put(7, "score", np.float32(np.nan)), "column score, row 7: must not be null"),
    (lambda f: f.drop(index=1).reset_index(drop=True), "request 'b' has no row of mode 'adapter'"),
    (lambda f: f.drop(index=5).reset_index(drop=True), "request 'c' has no row of mode 'base'"),
    (put(0, "output_tokens", 9), "column output_tokens, row 0: must equal the number of the request's step rows"),
]


@pytest.mark.parametrize(("change", "message"), STEP_RULES)
def test_a_broken_step_row_is_named(change: Change, message: str) -> None:
    """A step row that breaks a rule is refused by table, column and row."""
    with pytest.raises(InputError, match=message) as caught:
        checked(change(tiny_steps()), tiny_rollouts(), tiny_meta())
    assert "steps: " in str(caught.value)


@pytest.mark.parametrize(("change", "message"), ROLLOUT_RULES)
def test_a_broken_rollout_row_is_named(change: Change, message: str) -> None:
    """A rollout row that breaks a rule is refused by table, column and row, or by request where a row is lacking."""
    with pytest.raises(InputError, match=message) as caught:
        checked(tiny_steps(), change(tiny_rollouts()), tiny_meta())
    assert "rollouts: " in str(caught.value)


def test_the_row_is_counted_within_its_file(tmp_path: Path) -> None:
    """With two files the message names the second one and the row within it."""
    steps = tiny_steps()
    write_traces(tmp_path, steps.iloc[:13], tiny_rollouts(), tiny_meta())
    write_traces(tmp_path, put(15, "margin", np.float32(-0.5))(steps).iloc[13:], tiny_rollouts().iloc[:0], tiny_meta())
    with pytest.raises(InputError, match=r"steps/part-00001\.parquet: column margin, row 2: must be in"):
        read_traces(tmp_path)


def test_undefined_signals_are_missing_and_not_refused() -> None:
    """A NaN signal is what features/ gives for an undefined one, so it passes, at probed steps too."""
    steps = put(4, "kl", np.float32(np.nan))(put(6, "entropy", np.float32(np.nan))(tiny_steps()))
    assert checked(steps, tiny_rollouts(), tiny_meta()).steps["kl"].isna().sum() == 13
