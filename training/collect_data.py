"""The requests of a collection: rows of JSONL files, checked before anything expensive starts.

A row is an object with `prompt` (text) or `messages` (a chat), usually a `reference`, an optional `id`, and whatever
else its scorer reads. A row without an id is named after its content, so that the same request has the same id in
every collection: `tune` refuses calibration requests that training has seen, by id.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from lorazor.features.errors import InputError
from lorazor.training.config import CollectConfig, TaskConfig
from lorazor.training.scorers import CheckedScorer, load_scorer

ID_DIGITS = 16  # hex digits of a content id: 64 bits


@dataclass(frozen=True)
class Request:
    """One row: its id (`task/…`, unique in the collection), what is asked, and the whole row for the scorer."""

    id: str
    task: str
    row: dict[str, Any]
    where: str  # file and line, for messages


@dataclass(frozen=True)
class Task:
    """A task of the configuration with its scorer and its requests, in the order of the file."""

    name: str
    config: TaskConfig
    scorer: CheckedScorer
    requests: list[Request]


def load_tasks(config: CollectConfig, search: Path, limit: int | None = None) -> list[Task]:
    """Every task with its requests; each row is checked, and scored once with an empty text by built-in scorers.

    Args:
        search: the folder in which scorer modules are looked for (that of the YAML file).
        limit: at most so many requests of each task, below the task's own limit.

    Raises:
        InputError: a bad row (names file and line), no row at all, a repeated id or an unknown scorer.
    """
    tasks = []
    for name, task in config.tasks.items():
        scorer = load_scorer(task.scorer, task.scorer_args, [search, Path.cwd()])
        limits = [value for value in (limit, task.limit) if value is not None]
        requests = read_requests(task.data, name, min(limits, default=None))
        for request in requests if scorer.built_in else requests[:1]:
            try:
                scorer("", request.row, request.id)
            except InputError as error:
                raise InputError(f"{request.where}: {error}") from None
        tasks.append(Task(name, task, scorer, requests))
    return tasks


def read_requests(path: Path, task: str, limit: int | None = None) -> list[Request]:
    """The first `limit` requests of a JSONL file (blank lines are skipped); InputError names file and line."""
    requests: list[Request] = []
    seen: dict[str, str] = {}
    for row, where in islice(read_rows(path), limit):
        request = Request(f"{task}/{_identity(row, where)}", task, row, where)
        if request.id in seen:
            raise InputError(f"{where}: the same id or request as {seen[request.id]} ({request.id})")
        seen[request.id] = where.rpartition(", ")[2]
        requests.append(request)
    if not requests:
        raise InputError(f"{path}: holds no request")
    return requests


def read_rows(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Each checked row of a JSONL file, with its file and line for messages; InputError names them."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as UTF-8 text: {error}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{path}, line {number}"
            yield _row(line, where, path.parent), where


def encode_prompt(tokenizer: Any, row: dict[str, Any]) -> list[int]:
    """A row's prompt tokens, as the server makes them; a chat goes through the base's own chat template.

    Raises:
        InputError: the template refuses the messages.
    """
    if "prompt" in row:
        return list(tokenizer.encode(row["prompt"]))
    try:
        text = tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, tokenize=False)
    except Exception as error:  # a template is a program of the model's makers and raises what it likes
        raise InputError(f"the base's chat template does not take these messages: {error}") from error
    return list(tokenizer.encode(text, add_special_tokens=False))


def _row(line: str, where: str, folder: Path) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise InputError(f"{where}: a row must be an object, got {type(row).__name__}")
    if ("prompt" in row) == ("messages" in row):
        raise InputError(f'{where}: give either "prompt" or "messages", got the keys {", ".join(row) or "none"}')
    if "prompt" in row and not (isinstance(row["prompt"], str) and row["prompt"]):
        raise InputError(f'{where}: "prompt" must be a text that is not empty, got {row["prompt"]!r}')
    if "messages" in row and not _is_chat(row["messages"]):
        raise InputError(f'{where}: "messages" must be a list of objects with "role" and "content"')
    if isinstance(row.get("database"), str):
        row["database"] = str(folder / row["database"])
    return row


def _is_chat(messages: Any) -> bool:
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(isinstance(part, dict) and isinstance(part.get("role"), str) and "content" in part for part in messages)
    )


def _identity(row: dict[str, Any], where: str) -> str:
    if "id" in row:
        if not isinstance(row["id"], str | int) or row["id"] == "":
            raise InputError(f'{where}: "id" must be text or a whole number, got {row["id"]!r}')
        return str(row["id"])
    content = json.dumps([row.get("prompt"), row.get("messages"), row.get("reference")], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:ID_DIGITS]
