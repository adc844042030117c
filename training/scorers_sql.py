"""Execution match for SQL: the query of the text and the reference's must give the same rows on the row's database.

The text is written by a model, so the query runs where it can do no harm: an in-memory copy or a read-only file, an
authorizer that allows reading only, a limit on the size of any value, and a time limit.
"""

import re
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from lorazor.features.errors import InputError
from lorazor.training.scorers_text import Example, text_references

ALLOWED_ACTIONS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
DENIED_FUNCTIONS = {"load_extension", "readfile", "writefile", "fts3_tokenizer"}
OPCODES_PER_TICK = 1_000  # virtual-machine steps between looks at the clock
MAX_VALUE_BYTES = 1_000_000  # a text or blob above it is an error, as a single function call cannot be timed out
MAX_ROWS = 100_000

Row = tuple[Any, ...]


def sql_execution(
    text: str, example: Example, *, schema: str | None = None, database: str | None = None, time_limit: float = 2.0
) -> float:
    """1 when the text's query gives the rows of a reference's query: as a multiset, in order if the reference orders.

    The database comes from the row (`schema`: a script that makes and fills it; or `database`: a SQLite file) or from
    the settings of the same names. `time_limit` is in seconds for one query. Numbers are compared to six decimals;
    column names do not matter.

    Raises:
        InputError: no database, or a reference that does not run on it.
    """
    script, file = example.get("schema", schema), example.get("database", database)
    with closing(_open(script, file)) as connection, _guarded(connection, time_limit) as clock:
        expected = []
        for reference in text_references(example):
            rows = _rows(connection, reference, clock)
            if isinstance(rows, str):
                raise InputError(f"the reference query does not run ({rows}): {reference!r}")
            expected.append((rows, _orders(reference)))
        found = _rows(connection, query_of(text), clock)
    if isinstance(found, str):
        return 0.0
    return float(any(_same(found, rows, ordered) for rows, ordered in expected))


def query_of(text: str) -> str:
    """The first SQL statement of a reply: inside the first code fence if there is one, up to its semicolon."""
    fence = re.search(r"```[a-zA-Z]*\s*\n?(.*?)(?:```|$)", text, re.DOTALL)
    body = fence.group(1) if fence else text
    for mark in re.finditer(";", body):
        if _complete(body[: mark.end()]):
            return body[: mark.start()].strip()
    return body.strip()


def _complete(sql: str) -> bool:
    try:
        return sqlite3.complete_statement(sql)
    except ValueError:  # a NUL or half a surrogate pair: nothing that SQLite could read
        return False


def _open(script: str | None, file: str | None) -> sqlite3.Connection:
    if (script is None) == (file is None):
        raise InputError('give either "schema" (a script that makes the tables) or "database" (a SQLite file)')
    try:
        if file is not None:
            connection = sqlite3.connect(f"{Path(file).absolute().as_uri()}?mode=ro&immutable=1", uri=True)
            connection.execute("SELECT count(*) FROM sqlite_master")
        else:
            connection = sqlite3.connect(":memory:")
            connection.executescript(str(script))
    except sqlite3.Error as error:
        raise InputError(f"the database cannot be opened ({error}): {file or script!r}") from None
    return connection


class _Clock:
    """The time limit of the running query; `late` is sqlite's progress handler, and true stops the query."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.end = 0.0

    def start(self) -> None:
        self.end = time.monotonic() + self.seconds

    def late(self) -> bool:
        return time.monotonic() > self.end


@contextmanager
def _guarded(connection: sqlite3.Connection, time_limit: float) -> Iterator[_Clock]:
    clock = _Clock(time_limit)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    connection.set_authorizer(_authorize)
    connection.set_progress_handler(clock.late, OPCODES_PER_TICK)
    yield clock


def _authorize(action: int, first: str | None, second: str | None, database: str | None, trigger: str | None) -> int:
    allowed = action in ALLOWED_ACTIONS and (
        action != sqlite3.SQLITE_FUNCTION or (second or "").lower() not in DENIED_FUNCTIONS
    )
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def _rows(connection: sqlite3.Connection, query: str, clock: _Clock) -> list[Row] | str:
    """The rows of a query, or why there are none."""
    clock.start()
    try:
        cursor = connection.execute(query)
        if cursor.description is None:
            return "it is no query"
        rows = cursor.fetchmany(MAX_ROWS + 1)
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, MemoryError) as error:
        return str(error)
    return rows if len(rows) <= MAX_ROWS else f"more than {MAX_ROWS} rows"


def _orders(query: str) -> bool:
    """Whether the outermost query has an ORDER BY: what is left once literals and parentheses are gone says so."""
    bare = re.sub(
        r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|\[[^\]]*\]|`[^`]*`|--[^\n]*|/\*.*?\*/", " ", query, flags=re.DOTALL
    )
    while (shorter := re.sub(r"\([^()]*\)", " ", bare)) != bare:
        bare = shorter
    return re.search(r"\border\s+by\b", bare, re.IGNORECASE) is not None


def _same(found: list[Row], expected: list[Row], ordered: bool) -> bool:
    a, b = [_plain(row) for row in found], [_plain(row) for row in expected]
    return a == b if ordered else Counter(a) == Counter(b)


def _plain(row: Row) -> Row:
    return tuple(round(value, 6) if isinstance(value, float) else value for value in row)
