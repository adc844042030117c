"""Scorers of JSON texts, and the check of format constraints: equality, F1 over the fields, schema, length, words.

A text is read leniently: the first JSON object or array in it counts, so a fence or a sentence before it does no harm.
"""

import importlib
import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from lorazor.features.errors import InputError
from lorazor.training.scorers_text import Example

NOTHING = object()  # told apart from JSON's null
MAX_STARTS = 50  # places of a text at which a JSON value is tried


def first_json(text: str) -> Any:
    """The first JSON object or array in a text, else the whole text as a JSON value, else `NOTHING`."""
    decoder = json.JSONDecoder()
    for start in [found.start() for found in re.finditer(r"[\[{]", text)][:MAX_STARTS]:
        try:
            return decoder.raw_decode(text, start)[0]
        except (ValueError, RecursionError):
            continue
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return NOTHING


def _reference(example: Example) -> Any:
    if "reference" not in example:
        raise InputError('the row has no "reference"')
    value = example["reference"]
    if isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError as error:
            raise InputError(f'"reference" is not JSON ({error}): {value!r}') from None
    return value


def _leaves(value: Any, ordered: bool, ignore_case: bool, path: tuple[str | int, ...] = ()) -> Counter[tuple[Any, ...]]:
    """Every (path, leaf) of a JSON value; lists without an order lose their index. Empty containers are leaves."""
    if isinstance(value, dict) and value:
        pairs: list[tuple[str | int, Any]] = list(value.items())
    elif isinstance(value, list) and value:
        pairs = [(index if ordered else "[]", item) for index, item in enumerate(value)]
    else:
        return Counter([(path, _plain(value, ignore_case))])
    found: Counter[tuple[Any, ...]] = Counter()
    for key, item in pairs:
        found += _leaves(item, ordered, ignore_case, (*path, key))
    return found


def _plain(value: Any, ignore_case: bool) -> tuple[str, Any]:
    """A leaf with its kind, since Python holds True == 1 and JSON does not; 1 and 1.0 are the same number."""
    if isinstance(value, str):
        return ("text", " ".join(value.split()).casefold() if ignore_case else value)
    if isinstance(value, bool) or value is None:
        return ("constant", value)
    return ("number", float(value)) if isinstance(value, int | float) else ("empty", type(value).__name__)


def json_field_f1(text: str, example: Example, *, ordered_lists: bool = True, ignore_case: bool = False) -> float:
    """F1 over the (path, value) leaves of the text's JSON and of the reference's; 0 when the text holds no JSON."""
    wanted = _leaves(_reference(example), ordered_lists, ignore_case)
    value = first_json(text)
    if value is NOTHING:
        return 0.0
    try:
        found = _leaves(value, ordered_lists, ignore_case)
    except (RecursionError, OverflowError):  # nested too deep, or an integer beyond any float
        return 0.0
    return 2 * (wanted & found).total() / (wanted.total() + found.total())


def json_equal(text: str, example: Example, *, ordered_lists: bool = True, ignore_case: bool = False) -> float:
    """1 when the text's first JSON value equals the reference; the order of an object's keys does not matter."""
    score = json_field_f1(text, example, ordered_lists=ordered_lists, ignore_case=ignore_case)
    return float(score == 1.0)


def _is_kind(kind: type) -> Callable[[str], bool]:
    def check(text: str) -> bool:
        try:
            return isinstance(json.loads(text), kind)
        except (ValueError, RecursionError):
            return False

    return check


def _lines_match(pattern: str) -> Callable[[str], bool]:
    def check(text: str) -> bool:
        lines = [line for line in text.splitlines() if line.strip()]
        return bool(lines) and all(re.match(pattern, line) for line in lines)

    return check


def _numbered(text: str) -> bool:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return bool(lines) and all(re.match(rf"{n}[.)]\s", line) for n, line in enumerate(lines, 1))


FORMATS: dict[str, Callable[[str], bool]] = {
    "json": _is_kind(object),
    "json_object": _is_kind(dict),
    "json_array": _is_kind(list),
    "numbered_list": _numbered,
    "bullet_list": _lines_match(r"\s*[-*•]\s"),
    "single_line": lambda text: bool(text) and "\n" not in text,
    "number": lambda text: re.fullmatch(r"[-+]?\d+(\.\d+)?", text) is not None,
}


def format_check(
    text: str,
    example: Example,
    *,
    format: str | None = None,
    schema: dict[str, Any] | None = None,
    pattern: str | None = None,
    min_words: int = 0,
    max_words: int | None = None,
    contains: list[str] | None = None,
    lacks: list[str] | None = None,
) -> float:
    """1 when the stripped text meets every given constraint. No reference is read.

    Args:
        format: one of `FORMATS`.
        schema: a JSON Schema for the whole text (needs the jsonschema library).
        pattern: a regular expression that the whole text must match (`.` matches line ends too).
        min_words, max_words: bounds on the number of words, both inclusive.
        contains, lacks: phrases that must, or must not, occur; case does not matter.
    """
    text = text.strip()
    if format is not None and format not in FORMATS:
        raise InputError(f'format_check: unknown format "{format}"; allowed: {", ".join(FORMATS)}')
    words, lowered = len(text.split()), text.lower()
    checks = (
        format is None or FORMATS[format](text),
        schema is None or _fits_schema(text, schema),
        pattern is None or re.fullmatch(pattern, text, re.DOTALL) is not None,
        min_words <= words <= (words if max_words is None else max_words),
        all(phrase.lower() in lowered for phrase in contains or ()),
        not any(phrase.lower() in lowered for phrase in lacks or ()),
    )
    return float(all(checks))


def _fits_schema(text: str, schema: dict[str, Any]) -> bool:
    try:
        jsonschema = importlib.import_module("jsonschema")  # comes with vLLM and MLflow; it has no types
    except ImportError:
        raise InputError("format_check: a schema needs the jsonschema library, which is not installed") from None
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, RecursionError, jsonschema.ValidationError):
        return False
    except jsonschema.SchemaError as error:
        raise InputError(f"format_check: the schema is not a JSON Schema: {error.message}") from None
    return True
