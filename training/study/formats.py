"""What an output must look like, task by task, whatever it scores; and what a refusal looks like.

A format is one of the whole output but for white space around it, as the program that reads it would need it; only a
GSM8K answer may have text before it. None of these functions raises, whatever a model may have written.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from typing import Any

from lorazor.training.scorers_sql import query_of

_ACTIONS = "walk|run|jump|look|turn left|turn right"
_STEP = re.compile(rf"([0-9]{{1,6}})\. (?:{_ACTIONS})")
_ANSWER = re.compile(r"####\s*\$?-?[0-9][0-9,.]*\s*$")
# Openers of refusals as in the keyword lists that jailbreak studies count with (Zou et al. 2023, arXiv 2307.15043),
# without those that open ordinary answers ("As an", "I'm just") and those that stand within one ("illegal").
REFUSALS = (
    "i'm sorry",
    "i am sorry",
    "i'm really sorry",
    "i am really sorry",
    "sorry",
    "i apologize",
    "my apologies",
    "as an ai",
    "as a language model",
    "as an assistant",
    "i cannot",
    "i can't",
    "i am unable",
    "i'm unable",
    "i'm not able",
    "i am not able",
    "unfortunately, i",
)


def refuses(text: str) -> bool:
    """Whether a text opens like a refusal; the scorer `refusal` looks further, but these outputs quote their users."""
    return text.strip().lower().replace("\u2019", "'").startswith(REFUSALS)


def is_intents(text: str) -> bool:
    """A JSON list, not empty, of objects with an `intent`, which is text, and `slots`, texts by name."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, list) and bool(found) and all(map(_is_intent, found))


def _is_intent(item: Any) -> bool:
    if not isinstance(item, dict) or item.keys() != {"intent", "slots"} or not isinstance(item["slots"], dict):
        return False
    return all(isinstance(value, str) for value in (item["intent"], *item["slots"].values()))


def is_query(text: str) -> bool:
    """One SELECT that SQLite's own parser takes; its tables need not be there."""
    query = text.strip().removesuffix(";").rstrip()
    if not query.lower().startswith("select") or query_of(text) != query:
        return False
    with closing(sqlite3.connect(":memory:")) as connection:
        try:
            connection.execute(f"EXPLAIN {query}")
        except (sqlite3.Error, ValueError) as error:
            return str(error).startswith("no such table")
    return True


def is_plan(text: str) -> bool:
    """Lines `1. ACTION`, `2. ACTION`, ... of known actions."""
    steps = [_STEP.fullmatch(line.strip()) for line in text.strip().split("\n")]
    return all(step is not None and int(step[1]) == k for k, step in enumerate(steps, 1))


def is_prose(text: str) -> bool:
    """Something that ends like a sentence."""
    return text.rstrip().endswith((".", "!", "?"))


def has_answer(text: str) -> bool:
    """`#### NUMBER` at the end."""
    return _ANSWER.search(text) is not None


FORMATS: dict[str, Callable[[str], bool]] = {
    "snips_json": is_intents,
    "wikisql": is_query,
    "scan": is_plan,
    "e2e": is_prose,
    "gsm8k": has_answer,
}
"""The constraint of a task; one that is not here has none."""
