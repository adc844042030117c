"""import-traces: tables from elsewhere are taken as they are when right, and told by column and row when not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from lorazor.features.errors import InputError
from lorazor.training.import_traces import import_traces
from lorazor.training.traces import META, TraceSet, read_traces
from tests.planted import planted_traces
from tests.training.fake_engine import make_collection

FORMATS = {
    "parquet": lambda frame, path: frame.to_parquet(path),
    "csv": lambda frame, path: frame.to_csv(path, index=False),
    "jsonl": lambda frame, path: frame.to_json(path, orient="records", lines=True, double_precision=15),
}


@pytest.fixture(scope="module")
def traces() -> TraceSet:
    """A few planted requests."""
    return planted_traces(6, seed=1)


def write(folder: Path, steps: pd.DataFrame, rollouts: pd.DataFrame, kind: str = "csv", meta: str = "") -> Path:
    """Both tables, and meta.json where given, in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    FORMATS[kind](steps, folder / f"steps.{kind}")
    FORMATS[kind](rollouts, folder / f"rollouts.{kind}")
    if meta:
        (folder / META).write_text(meta)
    return folder


def problems(folder: Path) -> list[str]:
    """The lines that import-traces refuses the folder with; without the folder's name."""
    with pytest.raises(InputError) as caught:
        import_traces(folder, folder.parent / "never")
    assert not (folder.parent / "never").exists()
    return str(caught.value).replace(f"{folder}/", "").splitlines()


@pytest.mark.parametrize("kind", sorted(FORMATS))
def test_a_right_table_comes_out_as_it_went_in(tmp_path: Path, traces: TraceSet, kind: str) -> None:
    """Parquet, CSV and JSONL give the same traces, integers, nulls and booleans included."""
    source = write(tmp_path / "in", traces.steps, traces.rollouts, kind, traces.meta.model_dump_json())
    report = import_traces(source, tmp_path / "out", adapters={})
    back = read_traces(tmp_path / "out")
    exact = kind == "parquet"
    pd.testing.assert_frame_equal(back.steps, traces.steps, check_exact=exact, check_like=True, rtol=1e-6)
    pd.testing.assert_frame_equal(
        back.rollouts[list(traces.rollouts)], traces.rollouts, check_exact=exact, check_like=True, rtol=1e-6
    )
    assert back.meta == traces.meta
    assert report.requests == {"sql": 6}
    assert (report.off_grid, report.missing) == (0, 0)
    assert "6 requests" in report.render()


def test_tables_may_be_many_files_in_folders(tmp_path: Path, traces: TraceSet) -> None:
    """`steps/*` is read like `steps*`, file after file."""
    half = len(traces.steps) // 2
    (tmp_path / "in" / "steps").mkdir(parents=True)
    traces.steps[:half].to_csv(tmp_path / "in" / "steps" / "a.csv", index=False)
    traces.steps[half:].to_parquet(tmp_path / "in" / "steps" / "b.parquet")
    traces.rollouts.to_csv(tmp_path / "in" / "rollouts.csv", index=False)
    (tmp_path / "in" / META).write_text(traces.meta.model_dump_json())
    import_traces(tmp_path / "in", tmp_path / "out")
    assert len(read_traces(tmp_path / "out").steps) == len(traces.steps)


def test_signals_may_be_missing(tmp_path: Path, traces: TraceSet) -> None:
    """A table without a signal's column is taken; the signal reads back as missing."""
    steps = traces.steps.drop(columns=["js", "base_entropy"])
    import_traces(write(tmp_path / "in", steps, traces.rollouts, meta=traces.meta.model_dump_json()), tmp_path / "out")
    back = read_traces(tmp_path / "out").steps
    assert back["js"].isna().all()
    assert back["kl"].notna().any()


def test_rollouts_off_the_grid_and_missing_ones_are_counted(tmp_path: Path, traces: TraceSet) -> None:
    """Neither is an error: the first are never used, the second never picked."""
    rollouts = traces.rollouts.copy()
    released = np.flatnonzero(rollouts["mode"] == "released")
    rollouts.loc[released[1], "release_step"] = 4
    report = import_traces(
        write(tmp_path / "in", traces.steps, rollouts, meta=traces.meta.model_dump_json()), tmp_path / "out"
    )
    assert (report.off_grid, report.missing) == (1, 1)
    assert "1 rollouts are not on the release grid" in report.render()


def edit_steps(column: str, row: int, value: Any) -> Callable[[pd.DataFrame, pd.DataFrame], None]:
    """Set one cell of the steps."""

    def edit(steps: pd.DataFrame, rollouts: pd.DataFrame) -> None:
        steps[column] = steps[column].astype(object)
        steps.loc[row, column] = value

    return edit


def edit_rollouts(column: str, row: int, value: Any) -> Callable[[pd.DataFrame, pd.DataFrame], None]:
    """Set one cell of the rollouts."""

    def edit(steps: pd.DataFrame, rollouts: pd.DataFrame) -> None:
        rollouts[column] = rollouts[column].astype(object)
        rollouts.loc[row, column] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (edit_steps("entropy", 5, "high"), "steps.csv: column entropy, row 5: must be float, is 'high'"),
        (edit_steps("token_id", 2, 1.5), "steps.csv: column token_id, row 2: must be int32, is '1.5'"),
        (edit_steps("token_id", 2, 2**40), f"steps.csv: column token_id, row 2: must be int32, is '{2**40}'"),
        (edit_steps("probed", 1, "maybe"), "steps.csv: column probed, row 1: must be bool, is 'maybe'"),
        (edit_steps("top1_prob", 3, 1.5), "steps.csv: column top1_prob, row 3: must be in [0, 1.001], is 1.5"),
        (edit_steps("max_tokens", 0, None), "steps.csv: column max_tokens, row 0: must not be null, is null"),
        (edit_steps("step", 1, 7), "steps.csv: column step, row 2: steps of request 'sql-1-0' must run 0, 1, 2, …"),
        (edit_steps("adapter", 0, "x"), "steps.csv: column adapter, row 1: must be the same in every row of a request"),
        (edit_rollouts("score", 0, 1.2), "rollouts.csv: column score, row 0: must be in [0, 1], is 1.2"),
        (edit_rollouts("mode", 1, "bare"), "rollouts.csv: column mode, row 1: must be one of "),
        (
            edit_rollouts("request_id", 2, "who"),
            "rollouts.csv: column request_id, row 2: must be a request of the steps",
        ),
    ],
)
def test_a_wrong_cell_is_told_by_column_and_row(
    tmp_path: Path, traces: TraceSet, edit: Callable[[pd.DataFrame, pd.DataFrame], None], expected: str
) -> None:
    """The line names the file, the column, the row, the rule and the value."""
    steps, rollouts = traces.steps.copy(), traces.rollouts.copy()
    edit(steps, rollouts)
    lines = problems(write(tmp_path / "in", steps, rollouts, meta=traces.meta.model_dump_json()))
    assert any(line.startswith(expected) for line in lines), lines


def test_problems_of_many_columns_are_told_at_once(tmp_path: Path, traces: TraceSet) -> None:
    """A few rows of each bad column, ten lines in all, then how many more there are."""
    steps = traces.steps.astype(object)
    for column in ("entropy", "margin", "token_id", "kl"):
        steps.loc[10:20, column] = "x"
    steps = steps.rename(columns={"step": "stepp"})
    lines = problems(write(tmp_path / "in", steps, traces.rollouts, meta=traces.meta.model_dump_json()))
    assert len(lines) == 11
    assert "steps.csv: column stepp is not part of the format" in lines
    assert "steps.csv: column step is missing" in lines
    assert sum(line.startswith("steps.csv: column entropy, row 1") for line in lines) == 3
    assert lines[-1] == "… and 4 more"


def test_ranges_of_several_columns_are_told_at_once(tmp_path: Path, traces: TraceSet) -> None:
    """Rules on values are collected like types are."""
    steps = traces.steps.copy()
    steps.loc[0, "top1_prob"] = 3
    steps.loc[4, "entropy"] = -2
    lines = problems(write(tmp_path / "in", steps, traces.rollouts, "parquet", traces.meta.model_dump_json()))
    assert lines == [
        "steps.parquet: column entropy, row 4: must be in [-0.001, inf], is -2.0",
        "steps.parquet: column top1_prob, row 0: must be in [0, 1.001], is 3.0",
    ]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("steps.jsonl", "{", "steps.jsonl: line 1 is not JSON"),
        ("steps.jsonl", "[]", "steps.jsonl: line 1 must be an object, got list"),
        ("steps.parquet", "no", "steps.parquet is not a readable parquet table"),
        ("steps.csv", "", "steps.csv is not a readable csv table"),
        ("notes.txt", "x", "there is no steps table"),
    ],
)
def test_a_damaged_or_missing_file_is_told(tmp_path: Path, name: str, text: str, expected: str) -> None:
    """A file that cannot be read is named with the reason."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_text(text)
    assert any(expected in line for line in problems(tmp_path / "in"))


def test_without_a_meta_file_the_models_are_named_by_the_caller(tmp_path: Path, traces: TraceSet) -> None:
    """Fingerprints come from the folders; an adapter that is not given, or nothing given at all, is told."""
    make_collection(tmp_path / "models")
    source = write(tmp_path / "in", traces.steps, traces.rollouts)
    base, folder = tmp_path / "models" / "base", tmp_path / "models" / "a"
    with pytest.raises(InputError, match="so base, adapters and probe_interval are needed"):
        import_traces(source, tmp_path / "out")
    with pytest.raises(InputError, match='holds "sql-lora", whose folder is not given'):
        import_traces(source, tmp_path / "out", base=base, adapters={"x": folder}, probe_interval=8)
    import_traces(source, tmp_path / "out", base=base, adapters={"sql-lora": folder}, probe_interval=8, sampled=True)
    meta = read_traces(tmp_path / "out").meta
    assert (meta.adapters[0].task, meta.probe_interval, meta.greedy) == ("sql", 8, False)
    assert meta.tasks["sql"].max_tokens == traces.steps["max_tokens"].max()


def test_what_the_meta_file_says_is_not_said_twice(tmp_path: Path, traces: TraceSet) -> None:
    """Arguments beside a meta.json are refused rather than ignored."""
    source = write(tmp_path / "in", traces.steps, traces.rollouts, meta=traces.meta.model_dump_json())
    with pytest.raises(InputError, match="says it already: drop probe_interval"):
        import_traces(source, tmp_path / "out", probe_interval=8)


def test_another_probe_interval_is_seen(tmp_path: Path, traces: TraceSet) -> None:
    """The probed rows must be those of g."""
    meta = traces.meta.model_copy(update={"probe_interval": 4}).model_dump_json()
    lines = problems(write(tmp_path / "in", traces.steps, traces.rollouts, meta=meta))
    assert lines[0] == (
        "steps.csv: column probed, row 4: must be true exactly at step 1 and the multiples of g = 4, is False"
    )


def test_a_used_folder_is_refused(tmp_path: Path, traces: TraceSet) -> None:
    """Nothing is overwritten."""
    source = write(tmp_path / "in", traces.steps, traces.rollouts, meta=traces.meta.model_dump_json())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "x").write_text("x")
    with pytest.raises(InputError, match="is not empty"):
        import_traces(source, tmp_path / "out")
