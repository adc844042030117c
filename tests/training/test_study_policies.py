"""Policies, ablations and the report of a study, on planted traces."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from lorazor.training.baselines import ORACLE
from lorazor.training.losses import Kind
from lorazor.training.study.ablate import transfers
from lorazor.training.study.cells import load_parts
from lorazor.training.study.cli import main
from lorazor.training.study.layout import CALIBRATE, TEST, Cell, Layout
from lorazor.training.study.numbers import above, prompt_only
from lorazor.training.study.results import Results
from lorazor.training.study.subsample import subsample
from lorazor.training.traces import write_traces
from lorazor.training.tune import tune
from tests.planted import planted_traces
from tests.training.study_folder import plant

SQL, CHAT, SAFE = (Cell("tiny", task, "ordinary") for task in ("sql", "chat", "unsafe"))


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks that a policy can learn, and one where no release is safe, through all stages on the CPU."""
    out = tmp_path_factory.mktemp("study")
    plant(out, SQL)
    plant(out, CHAT, seed=1, noise=1.0)
    plant(out, SAFE, seed=2, kind="unsafe")
    for stage in ("policies", "ablate", "report"):
        assert main([stage, "--out", str(out), *(["--max-drop", "0.05"] if stage != "report" else [])]) == 0
    return out


def rows_of(study: Path, name: str, kind: Kind = "relative", /, **values: object) -> pd.DataFrame:
    """The rows of a table that have these values; of tuned policies those of one loss kind."""
    frame = pd.read_csv(study / f"{name}.csv")
    if "loss_kind" in frame:  # rows that are not tuned have none
        frame = frame[frame["loss_kind"].fillna(kind) == kind]
    for column, value in values.items():
        frame = frame[frame[column] == value]
    return frame


def test_every_policy_has_its_rows(study: Path) -> None:
    """Baselines, the learnt policy, the oracle and the fixed ways, over all requests and those with S > 0."""
    rows = rows_of(study, "policies", task="sql", scope="S > 0").set_index("policy")
    names = {"fixed step", "fixed fraction", "random", "entropy", "margin", "KL", "progress only", "logistic"}
    assert set(rows.index) == names | {"without probes", "LightGBM", "oracle", "never", "base only", "prompt only"}
    assert rows.loc["never", "active_row_share"] == 1
    assert rows.loc["prompt only", "active_row_share"] == 0
    assert rows.loc["oracle", "oracle_gap"] == 1
    assert rows.loc["random", "oracle_gap"] == 0
    gap, share = rows["oracle_gap"], rows["active_row_share"]
    assert 0.5 < float(gap["LightGBM"]) < 1.1  # it may spend a drop that the oracle never has
    assert float(rows["drop"]["LightGBM"]) < 0.05
    assert float(share["LightGBM"]) < float(share["fixed step"])
    assert {"q_base", "q_adapter", "q_policy", "retention", "length_ratio", "p_drop_above"} <= set(rows.columns)


@pytest.mark.parametrize("kind", ["relative", "net"])
def test_the_learnt_threshold_is_what_tune_sets(study: Path, tmp_path: Path, kind: Kind) -> None:
    """The artifact that was saved, tuned by `lorazor tune` on the same requests, gets the row's threshold."""
    layout = Layout(study)
    calibrate = load_parts(layout, SQL, 0).traces[CALIBRATE]
    write_traces(tmp_path, calibrate.steps, calibrate.rollouts, calibrate.meta)
    tuned = tune(layout.artifact(SQL), tmp_path, kind=kind, max_drop=0.05)
    row = rows_of(study, "policies", kind, task="sql", policy="LightGBM", scope="all")
    assert row["threshold"].item() == pytest.approx(tuned.tasks["sql"].threshold)


def test_where_nothing_is_safe_the_row_says_why(study: Path) -> None:
    """Without a policy the fixed ways are still measured."""
    rows = rows_of(study, "policies", task="unsafe")
    assert set(rows["policy"]) == {"never", "base only", "prompt only"}
    assert rows["note"].str.contains("every label is 'unsafe'").all()


def test_done_cells_are_skipped(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is computed again, and nothing is added."""
    before = (study / "policies.csv").read_bytes()
    assert main(["policies", "--out", str(study)]) == 0
    assert capsys.readouterr().err == ""
    assert (study / "policies.csv").read_bytes() == before


def test_a_collection_that_did_not_end_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Requests without a trace are counted in the sentence."""
    plant(tmp_path, SQL)
    path = Layout(tmp_path).collection(SQL) / "requests.jsonl"
    path.write_text(path.read_text() + '{"id": "new", "prompt": "?", "part": "test"}\n')
    assert main(["policies", "--out", str(tmp_path)]) == 2
    assert "the collection lacks 1 requests" in capsys.readouterr().err


def test_ablations(study: Path) -> None:
    """KL carries the planted truth: without probes the share is larger; coarser intervals and transfers have rows."""
    rows = rows_of(study, "ablation", task="sql", scope="S > 0").set_index("variant")["active_row_share"]
    assert rows["whole"] < rows["without probes"]
    assert rows["whole"] == rows["g = 8"]
    assert rows["g = 8"] < rows["g = 32"]
    assert rows["from the other tasks"] < 1
    assert "from all of its backbone's" in rows.index
    notes = rows_of(study, "ablation", task="sql", variant="g = 4")["note"]
    assert notes.str.contains("collect with g = 4").all()
    features = rows_of(study, "importance", task="sql")
    assert features["share_of_gain"].sum() == pytest.approx(1)
    assert set(features["feature"].head(5)) & {"kl", "js", "kl_mean", "base_token_logprob", "logprob_gap"}


def test_subsampled_traces_are_those_of_a_larger_interval() -> None:
    """Probes at the kept decisions alone, and the rollouts of the larger grid, none missing."""
    fine = planted_traces(50, seed=3, probe_interval=4)
    coarse = subsample(fine, 16)
    assert coarse.meta.probe_interval == 16
    probed = coarse.steps[coarse.steps["probed"]]
    assert set(probed["step"]) <= {1, 16, 32, 48}
    assert probed["kl"].notna().all()
    assert coarse.steps[~coarse.steps["probed"]]["kl"].isna().all()
    released = coarse.rollouts[coarse.rollouts["mode"] == "released"]
    assert set(released["release_step"]) == {1, 3, 18, 34, 50}
    with pytest.raises(ValueError, match="no multiple"):
        subsample(fine, 6)


def test_p_values_tell_a_drop_above_the_bound(study: Path) -> None:
    """Releasing everything after the prompt is far above 5 %, never releasing is not."""
    table = load_parts(Layout(study), SQL, 0).tables[TEST]
    never = table.outcome(table.first_decision(np.empty(0), None))
    assert above(table, never, 0.05) == {"p_drop_above": 1.0, "p_loss_above": 1.0}
    assert above(table, prompt_only(table), 0.05)["p_drop_above"] < 1e-6


def test_the_report_is_drawn_from_rows(study: Path) -> None:
    """Text and figures; the same rows give the same text."""
    text = (study / "report" / "study.md").read_text()
    assert "## Tuned policies on the test requests (S > 0)" in text
    assert "| tiny | sql | ordinary | LightGBM | relative | 0.05 |" in text
    assert "![bands-tiny](bands-tiny.png)" in text
    for name in ("bands", "retention", "since"):
        assert (study / "report" / f"{name}-tiny.png").stat().st_size > 10_000
    assert main(["report", "--out", str(study)]) == 0
    assert (study / "report" / "study.md").read_text() == text


def test_scores_by_tokens_since_the_release(study: Path) -> None:
    """Each released request that the adapter solves is counted once, under the tokens that the base wrote alone."""
    rows = rows_of(study, "since", task="sql")
    judged = rows_of(study, "policies", task="sql", policy="LightGBM", scope="S > 0")
    assert rows["n"].sum() == round(judged["released"].item() * judged["n"].item())
    assert (rows["tokens_from"] <= rows["tokens_to"]).all()
    assert rows["q_policy"].mean() > 0.9
    retention = (rows["q_policy"] - rows["q_base"]) / (rows["q_adapter"] - rows["q_base"])
    assert rows["retention"].dropna().to_numpy() == pytest.approx(retention[rows["retention"].notna()].to_numpy())
    assert rows["retention"].notna().any()


def test_bands_hold_their_points(study: Path) -> None:
    """The measured share and kept score lie within their own bands, and the oracle keeps all."""
    rows = rows_of(study, "bands", task="sql")
    for name in ("share", "kept"):
        assert (rows[f"{name}_low"] <= rows[name]).mean() > 0.9
        assert (rows[name] <= rows[f"{name}_high"]).mean() > 0.9
    assert (rows[rows["policy"] == ORACLE.name]["kept"] == 1).all()


def test_transfers_come_from_other_cells_alone() -> None:
    """Another task, backbone or adapter of the same rest; what nobody offers is left out."""
    cells = [SQL, CHAT, Cell("other", "sql", "ordinary"), Cell("tiny", "sql", "prompt-only")]
    assert transfers(SQL, cells) == {
        "from the other tasks": [CHAT],
        "from the other backbones": [cells[2]],
        "from the other adapters": [cells[3]],
        "from all of its backbone's": [SQL, CHAT],
    }
    assert transfers(SQL, [SQL]) == {}


def test_a_table_without_rows_is_not_written(tmp_path: Path) -> None:
    """A file without columns could not be read again; rows with new columns leave the old ones empty."""
    table = Results(tmp_path / "t.csv")
    table.add([])
    assert not table.path.exists()
    table.add([{"task": "sql", "drop": 0.1}])
    table.add([{"task": "chat", "note": "none"}])
    again = Results(table.path)
    assert again.has({"task": "chat"})
    assert not again.has({"task": "sql", "note": "none"})
    assert not again.has({"nothing": 1})
    assert list(again.frame["drop"].isna()) == [False, True]
