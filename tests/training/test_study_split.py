"""The study's division of items: by prompt, of the sizes asked for, and the same again."""

import json
from collections import defaultdict
from pathlib import Path

import pandas as pd
import pytest

from lorazor.features.errors import InputError
from lorazor.training.collect_data import read_requests
from lorazor.training.study.cli import main
from lorazor.training.study.layout import ADAPTER_PARTS, POLICY_PARTS, Layout
from lorazor.training.study.split import Sizes, divide
from lorazor.training.study.taskdata import score
from tests.training.study_folder import task_data

SMALL = ["--policy-train", "40", "--calibrate", "100", "--calibrate-least", "60", "--test", "40", "--validation", "10"]


@pytest.mark.parametrize("prompts", [1700, 3331, 5857, 8792, 60715])
def test_sizes(prompts: int) -> None:
    """They sum to the prompts, and calibration never has under its least."""
    sizes = Sizes().of(prompts, "sql")
    assert sum(sizes.values()) == prompts
    assert 1000 <= sizes["calibrate"] <= 4000
    assert sizes["policy-train"] <= 1000
    assert sizes["adapter-train"] + sizes["adapter-validation"] >= 0.4 * prompts - 1
    if prompts > 10_000:
        assert sizes == Sizes().of(prompts, "sql") | {"policy-train": 1000, "calibrate": 4000, "test": 1000}


def test_too_few_prompts_are_told() -> None:
    """Where calibration would have under its least, a sentence says so."""
    with pytest.raises(InputError, match="task 'sql': 1200 distinct prompts are too few for 1000 to calibrate"):
        Sizes().of(1200, "sql")


def test_the_order_of_the_items_does_not_matter() -> None:
    """A prompt's part follows from its text, and another seed divides otherwise."""
    items = [{"prompt": f"p{n}", "target": "t"} for n in range(200)]
    sizes = Sizes(20, 60, 20, 5, 0.4, 10)
    one, two = divide(items, "sql", sizes, 0), divide(items[::-1], "sql", sizes, 0)
    assert one == two
    assert one != divide(items, "sql", sizes, 1)


def test_no_prompt_is_in_two_parts(tmp_path: Path) -> None:
    """Files that finetune and collect read; the prompt with two targets keeps them in the adapter's parts alone."""
    data, out = task_data(tmp_path / "data"), tmp_path / "out"
    assert main(["split", "--data", str(data), "--out", str(out), *SMALL]) == 0
    where: dict[str, set[str]] = defaultdict(set)
    for part in (*ADAPTER_PARTS, *POLICY_PARTS):
        rows = [json.loads(line) for line in Layout(out).part("upper", part).read_text().splitlines()]
        for row in rows:
            where[row["messages"][0]["content"]].add(part)
            assert row["target"] == row["ref"]["answer"]
        if part in POLICY_PARTS:
            assert len(read_requests(Layout(out).part("upper", part), "upper")) == len(rows)
    assert len(where) == 400
    assert all(len(parts) == 1 for parts in where.values())
    table = pd.read_csv(out / "split.csv")
    assert dict(table.groupby("task")["prompts"].sum()) == {"double": 400, "upper": 400}
    assert table[(table["task"] == "upper") & (table["part"] == "calibrate")]["prompts"].item() == 100


def test_what_is_there_is_left_alone(tmp_path: Path) -> None:
    """A second run touches no file of a task that was divided."""
    data, out = task_data(tmp_path / "data"), tmp_path / "out"
    assert main(["split", "--data", str(data), "--out", str(out), "--task", "upper", *SMALL]) == 0
    part = Layout(out).part("upper", "test")
    part.write_text("untouched\n")
    assert main(["split", "--data", str(data), "--out", str(out), *SMALL]) == 0
    assert part.read_text() == "untouched\n"
    assert Layout(out).split_tasks() == ["double", "upper"]


def test_the_scorer_gives_the_headline_score(tmp_path: Path) -> None:
    """The first of what tasks.py says, for a row as `split` writes it."""
    data = str(task_data(tmp_path))
    assert score(" AB ", {"ref": {"answer": "AB"}}, folder=data, task="upper") == 1
    assert score("ab", {"ref": {"answer": "AB"}}, folder=data, task="upper") == 0


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["split", "--data", "nowhere", "--out", "{out}"], "nowhere is no folder of task data"),
        (["split", "--data", "{data}", "--out", "{out}", "--task", "uper"], 'did you mean "upper"?'),
        (["split", "--data", "{data}", "--out", "{out}"], "are too few"),
        (["adapters", "--base", "x", "--out", "{out}"], "run the stage split first"),
        (["policies", "--out", "{out}"], "run the stage collect first"),
        (["policies", "--out", "{out}", "--max-drop", "5"], "run the stage collect first"),
        (["report", "--out", "{out}"], "holds no results"),
        (["split", "--out", "{out}"], "Missing option '--data'"),
        (["fly"], "No such command"),
    ],
)
def test_bad_input_is_one_sentence(
    argv: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and what is wrong."""
    data = task_data(tmp_path / "data")
    assert main([word.format(data=data, out=tmp_path / "out") for word in argv]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("lorazor.training.study: ")
    assert words in last
