"""The scorers: what each rewards, what it refuses, and that a model's text can do no harm."""

import json
import math
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorazor.features.errors import InputError
from lorazor.training.scorers import SCORERS, CheckedScorer, load_scorer
from lorazor.training.scorers_text import refused

SCHEMA = """
CREATE TABLE fruit (name TEXT, kilos REAL);
INSERT INTO fruit VALUES ('pear', 2.5), ('plum', 1), ('fig', 1);
"""


def score(name: str, text: str, row: dict[str, Any] | None = None, **settings: Any) -> float:
    """The score of a text by a built-in scorer."""
    return load_scorer(name, settings)(text, row or {}, "q1")


@pytest.mark.parametrize(
    ("text", "reference", "settings", "expected"),
    [
        (" Blue  sky\n", "Blue sky", {}, 1),
        ("blue sky", "Blue sky", {}, 0),
        ("blue sky!", "Blue sky", {"ignore_case": True, "ignore_punctuation": True}, 1),
        ("sky\nmore", "sky", {"first_line": True}, 1),
        ("b", ["a", "b"], {}, 1),
        ("", "a", {}, 0),
    ],
)
def test_exact_match(text: str, reference: Any, settings: dict[str, Any], expected: float) -> None:
    """White space does not count; case, punctuation and later lines only where asked."""
    assert score("exact_match", text, {"reference": reference}, **settings) == expected


@pytest.mark.parametrize(
    ("text", "settings", "expected"),
    [
        ("id AB-12 ok", {"pattern": r"[A-Z]{2}-\d+"}, 1),
        ("id AB-12 ok", {"pattern": r"[A-Z]{2}-\d+", "full": True}, 0),
        ("ab-12", {"pattern": r"[A-Z]{2}-\d+", "ignore_case": True, "full": True}, 1),
        ("x", {}, 1),
    ],
)
def test_regex_match(text: str, settings: dict[str, Any], expected: float) -> None:
    """The pattern comes from the setting, else from the row."""
    assert score("regex_match", text, {"reference": "^x$"}, **settings) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("I'm sorry, but I can't help with that.", True),
        ("I’m sorry, but I can’t share this.", True),
        ("As an AI language model, I do not have opinions.", True),
        ("I cannot assist with this request.", True),
        ("I must decline.", True),
        ("That is against my guidelines.", True),
        ("The capital is Paris.", False),
        ("SELECT * FROM sorry WHERE can = 1", False),
        ("I can't wait to tell you: it is Paris.", False),
        ("The decline of the empire began in 1643.", False),
        ("It works. " * 40 + "I'm sorry, I can't do more.", False),
    ],
)
def test_refusals_are_told_from_answers(text: str, expected: bool) -> None:
    """A refusal scores 0 and an answer 1, whatever stands far behind."""
    assert refused(text) is expected
    assert score("refusal", text) == (0.0 if expected else 1.0)


def test_an_empty_text_is_a_refusal_unless_told_otherwise() -> None:
    """Saying nothing answers nothing."""
    assert score("refusal", " ") == 0
    assert score("refusal", " ", empty_is_refusal=False) == 1


@pytest.mark.parametrize(
    ("text", "reference", "settings", "expected"),
    [
        ("so 3 + 4 = 7.", 7, {}, 1),
        ("7 apples, not 8", "7", {}, 0),
        ("about $1,234.50", 1234.5, {}, 1),
        ("#### 12 (of 30)", "12", {"marker": "####"}, 1),
        ("12", "12", {"marker": "####"}, 0),
        ("-3e2", -300, {}, 1),
        ("1.01", 1, {"tolerance": 0.05}, 1),
        ("none", 0, {}, 0),
        ("from 3-4", 4, {}, 1),
        ("0.0000001", 0, {}, 1),
    ],
)
def test_number_match(text: str, reference: Any, settings: dict[str, Any], expected: float) -> None:
    """The last number counts, or the first after the marker; thousands, signs and exponents are read."""
    assert score("number_match", text, {"reference": reference}, **settings) == expected


def test_rouge_and_bleu_agree_with_a_hand_count() -> None:
    """ROUGE-L of 3 common words in order of 3 and 4: 2 * 1 * 0.75 / 1.75; equal texts score 1, strangers 0."""
    row = {"reference": "the cat sat down"}
    assert score("rouge_l", "the cat sat", row) == pytest.approx(2 * 0.75 / 1.75)
    for name in ("rouge_l", "bleu"):
        assert score(name, "the cat sat down", row) == pytest.approx(1)
        assert score(name, "", row) == 0
        assert score(name, "the cat sat down", {"reference": ["no", "the cat sat down"]}) == pytest.approx(1)
    # All n-gram precisions are 1, so what is left is the brevity penalty exp(1 - 5/4).
    assert score("bleu", "the cat sat down", {"reference": "the cat sat down here"}) == pytest.approx(math.exp(-0.25))


@pytest.mark.parametrize(
    ("text", "equal", "f1"),
    [
        ('{"a": 1, "b": ["x", "y"]}', 1, 1),
        ('```json\n{"b": ["x", "y"], "a": 1.0}\n```', 1, 1),
        ('{"a": 1, "b": ["y", "x"]}', 0, 1 / 3),
        ('{"a": true, "b": ["x", "y"]}', 0, 2 / 3),
        ('{"a": 1}', 0, 0.5),
        ('{"a": 1, "b": ["x", "y"], "c": {}}', 0, 6 / 7),
        ("[[[", 0, 0),
        ("[" * 100_000, 0, 0),
        ("{" + f'"a": 1{"0" * 400}' + "}", 0, 0),
        ("no", 0, 0),
    ],
)
def test_json_scores(text: str, equal: float, f1: float) -> None:
    """The first JSON value of the text counts; F1 is over (path, leaf) pairs; a hostile text scores 0."""
    row = {"reference": {"a": 1, "b": ["x", "y"]}}
    assert score("json_equal", text, row) == equal
    assert score("json_field_f1", text, row) == pytest.approx(f1)


def test_lists_may_be_compared_without_their_order() -> None:
    """`ordered_lists: false` compares lists as multisets."""
    row = {"reference": '["x", "y", "y"]'}
    assert score("json_equal", '["y", "x", "y"]', row, ordered_lists=False) == 1
    assert score("json_equal", '["y", "x", "x"]', row, ordered_lists=False) == 0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(JSON, JSON)
def test_json_f1_is_one_exactly_for_equal_values(a: Any, b: Any) -> None:
    """F1 is 1 if and only if the values are the same JSON, and it does not depend on which one is the reference."""
    there = score("json_field_f1", json.dumps([a]), {"reference": [b]})
    back = score("json_field_f1", json.dumps([b]), {"reference": [a]})
    assert there == back
    assert (there == 1) is (json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True))


@pytest.mark.parametrize(
    ("text", "settings", "expected"),
    [
        ('{"a": 1}', {"format": "json_object"}, 1),
        ('{"a": 1} and so on', {"format": "json_object"}, 0),
        ("1. a\n2. b", {"format": "numbered_list"}, 1),
        ("1. a\n3. b", {"format": "numbered_list"}, 0),
        ("- a\n* b", {"format": "bullet_list"}, 1),
        ("a\nb", {"format": "single_line"}, 0),
        ("-3.5", {"format": "number"}, 1),
        ("one two three", {"min_words": 2, "max_words": 3}, 1),
        ("one two three four", {"max_words": 3}, 0),
        ("Yes, Sir", {"contains": ["sir"], "lacks": ["no"]}, 1),
        ("Yes", {"contains": ["sir"]}, 0),
        ("ab\ncd", {"pattern": "a.*d"}, 1),
        ('{"a": "x"}', {"schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}, 0),
        ('{"a": 1}', {"schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}, 1),
    ],
)
def test_format_check(text: str, settings: dict[str, Any], expected: float) -> None:
    """1 only where every constraint given is met."""
    assert score("format_check", text, **settings) == expected


@pytest.mark.parametrize(
    ("query", "reference", "expected"),
    [
        ("SELECT name FROM fruit WHERE kilos = 1", "SELECT name FROM fruit WHERE kilos < 2", 1),
        ("SELECT name FROM fruit ORDER BY name", "SELECT name FROM fruit", 1),
        ("SELECT name FROM fruit ORDER BY name", "SELECT name FROM fruit ORDER BY name DESC", 0),
        ("SELECT name FROM fruit ORDER BY name DESC; -- done", "SELECT name FROM fruit ORDER BY name DESC", 1),
        ("```sql\nSELECT sum(kilos) FROM fruit;\n```\nThis sums.", "SELECT 4.5", 1),
        ("SELECT kilos FROM fruit WHERE kilos = 1", "SELECT DISTINCT kilos FROM fruit WHERE kilos = 1", 0),
        ("SELECT name FROM fruit", "SELECT name FROM (SELECT name FROM fruit ORDER BY name)", 1),
        ("SELECT ';' AS mark", "SELECT ';'", 1),
        ("SELECT nothing FROM fruit", "SELECT name FROM fruit", 0),
        ("", "SELECT name FROM fruit WHERE 0", 0),
    ],
)
def test_sql_compares_rows(query: str, reference: str, expected: float) -> None:
    """Rows are a multiset, in order only if the reference's outer query orders them."""
    assert score("sql_execution", query, {"schema": SCHEMA, "reference": reference}) == expected


@pytest.mark.parametrize("text", ["SELECT '\0';", "SELECT '\ud800';", "\0", "SELECT 1\0; SELECT 2;"])
def test_what_sqlite_cannot_read_scores_nothing(text: str) -> None:
    """A model may write anything, and one request must not end a collection."""
    assert score("sql_execution", text, {"schema": SCHEMA, "reference": "SELECT 1"}) == 0


@pytest.mark.parametrize(
    "query",
    [
        "DELETE FROM fruit",
        "DROP TABLE fruit",
        "INSERT INTO fruit VALUES ('x', 1) RETURNING name",
        "CREATE TABLE other (a)",
        "ATTACH DATABASE '{other}' AS other",
        "VACUUM INTO '{other}'",
        "PRAGMA writable_schema = 1",
        "SELECT load_extension('x')",
        "UPDATE fruit SET kilos = 0 RETURNING name",
    ],
)
def test_sql_cannot_write(tmp_path: Path, query: str) -> None:
    """Whatever is no reading query scores 0 and leaves the database file, and the disk, as they were."""
    file, other = tmp_path / "fruit.db", tmp_path / "other.db"
    with sqlite3.connect(file) as connection:
        connection.executescript(SCHEMA)
    connection.close()
    before = file.read_bytes()
    row = {"database": str(file), "reference": "SELECT name FROM fruit"}
    assert score("sql_execution", query.format(other=other), row) == 0
    assert file.read_bytes() == before
    assert not other.exists()


@pytest.mark.parametrize(
    "query",
    [
        "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n",
        "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x FROM n",
        "SELECT length(zeroblob(2000000000))",
    ],
)
def test_sql_ends_in_time(query: str) -> None:
    """An endless or huge query is stopped and scores 0."""
    start = time.monotonic()
    assert score("sql_execution", query, {"schema": SCHEMA, "reference": "SELECT 1"}, time_limit=0.3) == 0
    assert time.monotonic() - start < 3


@pytest.mark.parametrize(
    ("name", "row", "settings", "expected"),
    [
        ("sql_execution", {"reference": "SELECT 1"}, {}, 'give either "schema"'),
        ("sql_execution", {"schema": "CREATE", "reference": "SELECT 1"}, {}, "the database cannot be opened"),
        ("sql_execution", {"schema": SCHEMA, "reference": "SELECT x FROM y"}, {}, "the reference query does not run"),
        ("exact_match", {}, {}, 'the row has no "reference"'),
        ("exact_match", {"reference": []}, {}, "is an empty list"),
        ("bleu", {"reference": {"a": 1}}, {}, '"reference" must be text'),
        ("number_match", {"reference": "many"}, {}, "holds no number"),
        ("json_equal", {"reference": "{"}, {}, '"reference" is not JSON'),
        ("regex_match", {}, {"pattern": "("}, "is not a regular expression"),
        ("format_check", {}, {"format": "yaml"}, 'unknown format "yaml"'),
        ("format_check", {}, {"schema": {"type": "thing"}}, "not a JSON Schema"),
    ],
)
def test_a_row_that_cannot_be_scored_is_told(
    name: str, row: dict[str, Any], settings: dict[str, Any], expected: str
) -> None:
    """The sentence names the scorer, the request and what is missing."""
    with pytest.raises(InputError) as caught:
        score(name, "1", row, **settings)
    assert str(caught.value).startswith(f"scorer {name}, request q1: ")
    assert expected in str(caught.value)


def test_a_scorer_of_ones_own_is_found_beside_the_file(tmp_path: Path) -> None:
    """`module:function` is imported from the given folders and takes its settings."""
    (tmp_path / "own_scorer_a.py").write_text("def half(text, example, *, factor=1.0):\n    return 0.5 * factor\n")
    assert load_scorer("own_scorer_a:half", {"factor": 0.5}, [tmp_path])("x", {}) == 0.25
    with pytest.raises(InputError, match=r'unknown function "hlf" \(did you mean "half"\?\)'):
        load_scorer("own_scorer_a:hlf", {}, [tmp_path])
    with pytest.raises(InputError, match=r'unknown setting "fctor" \(did you mean "factor"\?\)'):
        load_scorer("own_scorer_a:half", {"fctor": 1}, [tmp_path])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rouge", r'unknown scorer "rouge" \(did you mean "rouge_l"\?\)'),
        ("no_such_module_here:f", "cannot import no_such_module_here"),
    ],
)
def test_an_unknown_scorer_is_told(name: str, expected: str) -> None:
    """A name that is neither built in nor importable is bad input."""
    with pytest.raises(InputError, match=expected):
        load_scorer(name)


@pytest.mark.parametrize("value", [math.nan, -0.1, 1.1, math.inf, "high", None])
def test_a_score_that_is_none_is_an_error(value: Any) -> None:
    """NaN, a value outside [0, 1] and what is no number are told with the scorer and the request."""
    with pytest.raises(InputError, match="scorer mine, request q9: "):
        CheckedScorer("mine", lambda text, example: value)("x", {}, "q9")


def test_a_scorer_that_raises_is_named() -> None:
    """An exception of somebody's scorer comes out with the scorer, the request and its type."""
    with pytest.raises(InputError, match="scorer mine, request q9: ZeroDivisionError: "):
        CheckedScorer("mine", lambda text, example: 1 / 0)("x", {}, "q9")


@given(st.text(max_size=60))
def test_every_scorer_takes_any_text(text: str) -> None:
    """Whatever a model writes gives a score in [0, 1] and no exception."""
    row = {"reference": "1", "schema": "CREATE TABLE t (a)"}
    row["reference"] = "SELECT 1"
    for name in SCORERS:
        reference = "1" if name.startswith("json") else "SELECT 1"
        assert 0 <= load_scorer(name)(text, {**row, "reference": reference}) <= 1
