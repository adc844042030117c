"""The trace folder: what is written comes back, files are whole, and reading names what is wrong."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lorazor.features.errors import InputError
from lorazor.training import traces as module
from lorazor.training.traces import ROLLOUTS, STEPS, append, read_traces, write_traces
from tests.planted import planted_traces
from tests.training.tiny_traces import tiny_meta, tiny_rollouts, tiny_steps, tiny_traces


def test_importing_the_format_loads_no_heavy_library() -> None:
    """A collector that only appends rows pays for neither LightGBM, scikit-learn, matplotlib nor MLflow."""
    code = (
        "import sys, lorazor.training.traces; "
        "print([m for m in ('lightgbm', 'sklearn', 'matplotlib', 'mlflow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_round_trip_keeps_every_value(tmp_path: Path) -> None:
    """Written and read tables are equal, nulls and dtypes included."""
    planted = planted_traces(40, seed=3)
    write_traces(tmp_path, planted.steps, planted.rollouts, planted.meta)
    back = read_traces(tmp_path)
    assert back.meta == planted.meta
    for column in planted.steps.columns:
        before, after = planted.steps[column].to_numpy(), back.steps[column].to_numpy()
        assert (before == after).all() or np.array_equal(before, after, equal_nan=True), column
    assert back.steps["kl"].dtype == np.float32
    assert back.rollouts["release_step"].dtype == pd.Int32Dtype()
    key = ["request_id", "mode", "release_step"]
    pd.testing.assert_frame_equal(
        back.rollouts[planted.rollouts.columns].sort_values(key, ignore_index=True),
        planted.rollouts.sort_values(key, ignore_index=True),
        check_dtype=False,
    )


def test_stored_types_are_those_of_the_design(tmp_path: Path) -> None:
    """The Parquet file itself has the types of design.md, also for the two columns that pandas holds differently."""
    write_traces(tmp_path, tiny_steps(), tiny_rollouts(), tiny_meta())
    steps = pq.read_schema(tmp_path / "steps" / "part-00000.parquet")
    rollouts = pq.read_schema(tmp_path / "rollouts" / "part-00000.parquet")
    assert steps.equals(module.STEP_COLUMNS)
    assert rollouts.equals(module.ROLLOUT_COLUMNS.remove(module.ROLLOUT_COLUMNS.get_field_index("text")))


def test_appending_adds_a_file_and_reads_as_one_table(tmp_path: Path) -> None:
    """A folder grows by whole files; rows of one request may even lie in two of them, out of order."""
    steps, rollouts = tiny_steps(), tiny_rollouts()
    write_traces(tmp_path, steps.iloc[10:], rollouts, tiny_meta())
    added = append(tmp_path, STEPS, steps.iloc[:10])
    assert added.name == "part-00001.parquet"
    back = read_traces(tmp_path)
    assert sorted(back.requests["request_id"]) == ["a", "b", "c"]
    assert back.requests.set_index("request_id")["length"].to_dict() == {"a": 8, "b": 5, "c": 4}
    for _, rows in back.steps.groupby("request_id"):
        assert rows["step"].tolist() == list(range(len(rows)))


def test_a_failing_write_leaves_nothing(tmp_path: Path) -> None:
    """A frame that doesn't fit the format leaves no file and no temporary one."""
    with pytest.raises(InputError, match="column score is missing"):
        append(tmp_path, ROLLOUTS, tiny_rollouts().drop(columns="score"))
    assert list(tmp_path.rglob("*.*")) == []


def test_dropped_signal_columns_read_back_as_missing(tmp_path: Path) -> None:
    """A shipped table may lack signals: they come back as NaN, with no complaint."""
    slim = tiny_steps().drop(columns=["js", "base_entropy", "base_top1_agrees"])
    write_traces(tmp_path, slim, tiny_rollouts().drop(columns="differs"), tiny_meta())
    back = read_traces(tmp_path)
    assert back.steps[["js", "base_entropy", "base_top1_agrees"]].isna().all(axis=None)
    assert back.steps["kl"].notna().sum() == 5
    assert not back.rollouts["differs"].any()


def test_select_and_keep() -> None:
    """A task or a set of requests can be taken out, steps and rollouts alike; an unknown task is named."""
    traces = tiny_traces()
    kept = traces.keep(["c", "a", "not there"])
    assert kept.requests["request_id"].tolist() == ["a", "c"]
    assert set(kept.rollouts["request_id"]) == {"a", "c"}
    assert len(traces.select("sql").steps) == len(traces.steps)
    with pytest.raises(InputError, match="task 'math' has no requests in these traces \\(they hold: sql\\)"):
        traces.select("math")


def test_digest_follows_the_rows_and_not_their_order(tmp_path: Path) -> None:
    """The same rows give the same digest from other files; one changed score gives another."""
    steps, rollouts = tiny_steps(), tiny_rollouts()
    write_traces(tmp_path / "one", steps, rollouts, tiny_meta())
    append(tmp_path / "two", STEPS, steps.iloc[10:])
    write_traces(tmp_path / "two", steps.iloc[:10], rollouts.iloc[::-1], tiny_meta())
    changed = rollouts.copy()
    changed.loc[0, "score"] = np.float32(0.25)
    write_traces(tmp_path / "three", steps, changed, tiny_meta())
    one, two, three = (read_traces(tmp_path / name).digest() for name in ("one", "two", "three"))
    assert one == two
    assert one != three


def test_what_is_no_trace_folder_is_told_in_one_sentence(tmp_path: Path) -> None:
    """A missing folder, a damaged meta.json, another version, an empty collection and a broken file."""
    with pytest.raises(InputError, match=r"is not a trace folder: it has no meta\.json"):
        read_traces(tmp_path / "nowhere")
    write_traces(tmp_path, tiny_steps(), tiny_rollouts(), tiny_meta())
    meta = tmp_path / "meta.json"
    good = meta.read_text()
    meta.write_text(good.replace('"probe_interval": 4', '"probe_interval": 0'))
    with pytest.raises(InputError, match=r"meta\.json: probe_interval: .*greater than 0"):
        read_traces(tmp_path)
    meta.write_text(good.replace('"format_version": 1', '"format_version": 9'))
    with pytest.raises(InputError, match="format_version is 9, this LoRazor reads 1"):
        read_traces(tmp_path)
    meta.write_text(good)
    (tmp_path / "steps" / "part-00001.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(InputError, match=r"steps/part-00001\.parquet is not a readable Parquet file"):
        read_traces(tmp_path)
    for path in (tmp_path / "steps").iterdir():
        path.unlink()
    with pytest.raises(InputError, match="there are no step rows, so there is nothing to learn from"):
        read_traces(tmp_path)


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("kl", pa.array(["x"] * 17), r"part-00000\.parquet: column kl must be float, is string"),
        ("step", pa.array([2**40] * 17), r"column step does not fit int32"),
        ("surprise", pa.array([1] * 17), "column surprise is not part of the format"),
        ("token_id", None, "column token_id is missing"),
    ],
)
def test_wrong_columns_are_named(tmp_path: Path, column: str, values: pa.Array | None, message: str) -> None:
    """A column of another type, out of range, unknown or missing is told with its file."""
    write_traces(tmp_path, tiny_steps(), tiny_rollouts(), tiny_meta())
    path = tmp_path / "steps" / "part-00000.parquet"
    table = pq.read_table(path)
    if column in table.column_names:
        table = table.drop_columns([column])
    pq.write_table(table if values is None else table.append_column(column, values), path)
    with pytest.raises(InputError, match=message):
        read_traces(tmp_path)
