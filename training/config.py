"""The YAML file of `lorazor collect`: what to run, with which adapters, and how each task is scored.

Every path in it is relative to the folder of the YAML file. Whatever is wrong is told in one sentence that names the
key, what is allowed there and the nearest known name. For example:

    base: models/base
    adapters: {sql: adapters/sql}
    probe_interval: 8
    engine: {dtype: bfloat16, enforce_eager: true, max_model_len: 2048}
    tasks:
      sql:
        adapter: sql
        data: sql.jsonl                # {"prompt": …, "reference": …, "schema": …} a line
        scorer: sql_execution
        max_tokens: 128
        sampling: {stop: "\\n"}
"""

import difflib
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from lorazor.features.errors import InputError

# `collect` sets these itself: an engine option of the same name would contradict the rest of the file.
OWNED_ENGINE_OPTIONS = {"model", "tokenizer_mode", "enable_lora", "additional_config", "logits_processors"}


def unknown(kind: str, name: str, allowed: Iterable[str]) -> str:
    """A sentence part: `unknown key "max_token" (did you mean "max_tokens"?); allowed: …`."""
    names = sorted(allowed)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    hint = f' (did you mean "{near[0]}"?)' if near else ""
    return f'unknown {kind} "{name}"{hint}; allowed: {", ".join(names) or "none"}'


class Strict(BaseModel):
    """A frozen model that refuses unknown keys with a suggestion."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for key in data:
                if key not in cls.model_fields:
                    raise ValueError(unknown("key", str(key), cls.model_fields))
        return data


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str | int) else value


class Sampling(Strict):
    """How tokens are chosen; the names and meanings are those of vLLM's SamplingParams. Greedy by default."""

    temperature: float = Field(default=0.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, gt=0)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    seed: int = Field(default=0, ge=0)
    stop: Annotated[list[str], BeforeValidator(_as_list)] = []
    stop_token_ids: Annotated[list[int], BeforeValidator(_as_list)] = []
    ignore_eos: bool = False

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0

    @property
    def forkable(self) -> bool:
        """Whether tokens may be given instead of generated: nothing else may depend on which of them were generated."""
        penalties = self.presence_penalty or self.frequency_penalty
        return self.greedy and not penalties and all(len(mark) == 1 for mark in self.stop)


class TaskConfig(Strict):
    """One task: its requests, the adapter that serves them and the scorer that judges the texts."""

    adapter: str
    data: Path
    scorer: str
    scorer_args: dict[str, Any] = {}
    max_tokens: int = Field(default=128, ge=1)
    sampling: Sampling = Sampling()
    limit: int | None = Field(default=None, ge=1)

    def rooted(self, folder: Path) -> "TaskConfig":
        """The task with its data file, and a SQL scorer's database, joined to `folder`."""
        update: dict[str, Any] = {"data": folder / self.data}
        if isinstance(database := self.scorer_args.get("database"), str):
            update["scorer_args"] = {**self.scorer_args, "database": str(folder / database)}
        return self.model_copy(update=update)


class NoiseConfig(Strict):
    """The never-against-never repeat: how many requests of each task, and how many of them run at once."""

    requests: int = Field(default=32, ge=0)
    concurrency: int = Field(default=4, ge=1)


class CollectConfig(Strict):
    """The whole file.

    `shard_size` is the number of requests whose rows are written, or lost in a crash, together. `rollouts`: "whole"
    runs every released request from its prompt, as a server would; "forked" gives it the trace's first r - 1 tokens
    and generates from there, about half the work. The two agree up to numerics. `texts` keeps the output texts, which
    `evaluate --pairs` needs; scores, steps and signals are kept either way.
    """

    base: Path
    adapters: dict[str, Path] = Field(min_length=1)
    tasks: dict[str, TaskConfig] = Field(min_length=1)
    probe_interval: int = Field(default=8, ge=1)
    engine: dict[str, Any] = {}
    shard_size: int = Field(default=128, ge=1)
    noise: NoiseConfig = NoiseConfig()
    rollouts: Literal["whole", "forked"] = "whole"
    texts: bool = False

    @model_validator(mode="after")
    def _names_agree(self) -> "CollectConfig":
        for name, task in self.tasks.items():
            if task.adapter not in self.adapters:
                raise ValueError(f'task "{name}": {unknown("adapter", task.adapter, self.adapters)}')
            if self.rollouts == "forked" and not task.sampling.forkable:
                raise ValueError(
                    f'task "{name}": rollouts: forked needs temperature 0, no presence or frequency penalty, and stop '
                    "strings of one character; use rollouts: whole"
                )
        for option in OWNED_ENGINE_OPTIONS & self.engine.keys():
            raise ValueError(f'engine option "{option}" is set by collect itself; remove it')
        return self

    def rooted(self, folder: Path) -> "CollectConfig":
        """The same configuration with every path joined to `folder`, where it is not absolute already."""
        tasks = {name: task.rooted(folder) for name, task in self.tasks.items()}
        adapters = {name: folder / path for name, path in self.adapters.items()}
        return self.model_copy(update={"base": folder / self.base, "adapters": adapters, "tasks": tasks})


def load_config(path: str | Path) -> CollectConfig:
    """Read and check the YAML file; its paths come back joined to its folder, and they exist.

    Raises:
        InputError: a missing or damaged file, an unknown or ill-typed key, or a path that is not there.
    """
    path = Path(path)
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_NoRepeatedKeys)
    except OSError as error:
        raise InputError(f"config {path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"config {path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise InputError(f"config {path}: must be a mapping with base, adapters and tasks, got {type(data).__name__}")
    try:
        config = CollectConfig.model_validate(data).rooted(path.parent)
    except ValidationError as error:
        raise InputError(f"config {path}: {describe(error)}") from None
    _check_paths(config, path)
    return config


def describe(error: ValidationError) -> str:
    """The first problem of a pydantic error as `key.path: what is wrong`."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] not in ("missing", "value_error"):
        message = f"{message}, got {first['input']!r}"
    return f"{where}: {message}" if where else message


def _check_paths(config: CollectConfig, source: Path) -> None:
    folders = {"base": config.base} | {f"adapters.{name}": path for name, path in config.adapters.items()}
    for key, folder in folders.items():
        if not folder.is_dir():
            raise InputError(f"config {source}: {key}: no folder {folder}")
    for name, task in config.tasks.items():
        if not task.data.is_file():
            raise InputError(f"config {source}: tasks.{name}.data: no file {task.data}")


class _NoRepeatedKeys(yaml.SafeLoader):
    """YAML lets a later key silently replace an earlier one; a task lost that way would go unnoticed."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen and key.value != "<<":
                line = key.start_mark.line + 1
                raise yaml.constructor.ConstructorError(None, None, f'key "{key.value}" is given twice (line {line})')
            seen.add(key.value)
        return super().construct_mapping(node, deep)
