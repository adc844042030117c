"""The study's stage `texts`: its counts against a plain loop, and what is a format and what a refusal."""

import json
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorazor.training.learned import LEARNED
from lorazor.training.study import texts
from lorazor.training.study.cli import main
from lorazor.training.study.formats import FORMATS, refuses
from lorazor.training.study.layout import TEST, Cell, Layout
from lorazor.training.traces import write_traces
from tests.training.study_folder import SIZES, plant, with_texts

INTENT = {"intent": "PlayMusic", "slots": {"artist": 'a "b" é', "year": "1999"}}
CELL = Cell("tiny", "sql", "ordinary")


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study with one cell, whose collection kept its texts, through the stages on the CPU."""
    out = tmp_path_factory.mktemp("texts")
    traces = plant(out, CELL)
    rows = Layout(out).collection(CELL) / "rows"
    for path in rows.rglob("*.parquet"):
        path.unlink()
    write_traces(rows, traces.steps, with_texts(traces), traces.meta)
    assert main(["policies", "--out", str(out), "--max-drop", "0.05"]) == 0
    return out


def test_counts_are_those_of_a_plain_loop(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted texts say which outcome they are, so the share of each outcome is what `format` counts."""
    monkeypatch.setitem(FORMATS, "sql", lambda text: " released " in text)
    monkeypatch.setattr(texts, "refuses", lambda text: text.endswith(" base"))
    for _ in range(2):  # a cell that is there is left alone
        assert main(["texts", "--out", str(study)]) == 0
    rows = {row["way"]: row for row in pd.read_csv(study / "texts.csv").to_dict("records")}
    assert list(rows) == ["never", "prompt only", "base only", LEARNED]
    assert all(row["n"] == SIZES[TEST] for row in rows.values())
    policy = pd.read_csv(study / "policies.csv").query("policy == @LEARNED and scope == 'all' and loss_kind == 'net'")
    assert rows[LEARNED]["released"] == round(float(policy["released"].item()) * SIZES[TEST])
    assert rows[LEARNED]["loss_kind"] == "net"  # the last row of the way
    assert 0 <= rows[LEARNED]["format"] < rows["prompt only"]["format"]
    assert rows["never"]["format"] == rows["base only"]["format"] == 0
    assert rows["base only"]["refusals"] > 0
    assert rows["never"]["refusals"] == rows["prompt only"]["refusals"] == 0
    assert main(["report", "--out", str(study)]) == 0
    assert "Outputs that keep their format" in (study / "report" / "study.md").read_text()


def test_without_policies_or_texts_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence each, and no table."""
    plant(tmp_path, CELL)
    assert main(["texts", "--out", str(tmp_path)]) == 2
    assert "run the stage policies first" in capsys.readouterr().err
    assert main(["policies", "--out", str(tmp_path), "--max-drop", "0.05"]) == 0
    assert main(["texts", "--out", str(tmp_path)]) == 2
    assert "kept no texts" in capsys.readouterr().err
    assert not (tmp_path / "texts.csv").exists()


@pytest.mark.parametrize(
    ("task", "good", "bad"),
    [
        (
            "snips_json",
            [json.dumps([INTENT]), f" [{json.dumps(INTENT)},\n{json.dumps(INTENT)}]\n"],
            [
                *("", "{}", "[]", "[1]", "[" * 100_000, json.dumps(INTENT), json.dumps([INTENT])[:-1]),
                *(json.dumps([INTENT]) + " so", '[{"intent": "a"}]', '[{"intent": "a", "slots": {"b": 1}}]'),
                *('[{"intent": null, "slots": {}}]', '[{"intent": "a", "slots": {}, "more": 1}]'),
            ],
        ),
        (
            "wikisql",
            ["SELECT a FROM t WHERE b = 'x'", "select 1", "SELECT a FROM t WHERE b = 'x; y';\n"],
            [
                *("", "SELECT FROM", "DROP TABLE t", "SELECT 'a", "SELECT a FROM t; SELECT b FROM t"),
                *(
                    "Here: SELECT 1",
                    "SELECT '\0",
                    "SELECT '\ud800'",
                    "SELECT\0;",
                    "```sql\nSELECT 1\n```",
                    "SELECT 1;;",
                ),
            ],
        ),
        (
            "scan",
            ["1. walk", "1. turn left\n2. jump"],
            ["", "walk", "2. walk", "1. dance", "1. walk\n3. run", "9" * 5000 + ". run"],
        ),
        ("e2e", ["It is good.", "Really?\n"], ["", "It is"]),
        ("gsm8k", ["so 2 + 2 = 4\n#### 4", "#### $1,000.50"], ["", "4", "#### four", "#### 4 apples", "#### ٣"]),
    ],
)
def test_formats(task: str, good: list[str], bad: list[str]) -> None:
    """What fits and what does not."""
    assert [FORMATS[task](text) for text in good] == [True] * len(good)
    assert [FORMATS[task](text) for text in bad] == [False] * len(bad)


@given(st.text() | st.text("[]{}\":, 019.#$-SELCTselct'();\n\0").map(lambda end: f"SELECT {end}"))
def test_no_text_is_too_odd(text: str) -> None:
    """Each check gives a yes or a no, and white space around the text changes nothing."""
    for fits in FORMATS.values():
        assert fits(text) is fits(f"\n {text.strip()} \n") or "\0" in text


def test_refusals() -> None:
    """By their opening, whatever the case and the apostrophe; ordinary answers are none."""
    assert all(map(refuses, ["I'm sorry, but", "  I\u2019M SORRY", "As an AI model", "I cannot do that", "Sorry, no."]))
    assert not any(map(refuses, ["", "As an alternative, the pub", "SELECT 1", "It cannot be", "I can do that"]))
