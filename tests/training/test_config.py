"""The collection's YAML: defaults, paths relative to the file, and one plain sentence for whatever is wrong."""

import textwrap
from pathlib import Path

import pytest

from lorazor.features.errors import InputError
from lorazor.training.config import CollectConfig, load_config

GOOD = """
base: base
adapters: {a: adapters/a}
probe_interval: 4
tasks:
  echo:
    adapter: a
    data: echo.jsonl
    scorer: exact_match
    max_tokens: 16
    sampling: {temperature: 0.5, stop: "\\n"}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with everything that GOOD names."""
    (tmp_path / "base").mkdir()
    (tmp_path / "adapters" / "a").mkdir(parents=True)
    (tmp_path / "echo.jsonl").write_text('{"prompt": "x", "reference": "x"}\n')
    return tmp_path


def load(folder: Path, text: str) -> CollectConfig:
    """The text as a file in the folder, loaded."""
    path = folder / "collect.yaml"
    path.write_text(textwrap.dedent(text))
    return load_config(path)


def test_paths_are_relative_to_the_file(folder: Path) -> None:
    """Every path comes back joined to the YAML's folder, and unset keys have their defaults."""
    config = load(folder, GOOD)
    task = config.tasks["echo"]
    assert (config.base, config.adapters["a"], task.data) == (
        folder / "base",
        folder / "adapters" / "a",
        folder / "echo.jsonl",
    )
    assert task.sampling.stop == ["\n"]
    assert not task.sampling.greedy
    assert (task.limit, config.shard_size, config.noise.concurrency) == (None, 128, 4)


def test_a_sql_database_is_relative_to_the_file(folder: Path) -> None:
    """The setting `database` of a scorer is a path of the YAML file too."""
    config = load(
        folder, GOOD.replace("scorer: exact_match", "scorer: sql_execution\n    scorer_args: {database: x.db}")
    )
    assert config.tasks["echo"].scorer_args == {"database": str(folder / "x.db")}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "max_tokens: 16",
            "max_token: 16",
            'tasks.echo: unknown key "max_token" (did you mean "max_tokens"?); allowed: ',
        ),
        ("temperature", "temprature", 'tasks.echo.sampling: unknown key "temprature" (did you mean "temperature"?)'),
        ("probe_interval", "probe_intervall", 'unknown key "probe_intervall" (did you mean "probe_interval"?)'),
        ("adapter: a", "adapter: b", 'task "echo": unknown adapter "b"; allowed: a'),
        ("max_tokens: 16", "max_tokens: many", "tasks.echo.max_tokens: Input should be a valid integer"),
        ("max_tokens: 16", "max_tokens: 0", "greater than or equal to 1, got 0"),
        ("    scorer: exact_match\n", "", "tasks.echo.scorer: Field required"),
        ("base: base", "base: bass", "base: no folder "),
        ("echo.jsonl", "ecco.jsonl", "tasks.echo.data: no file "),
        ("probe_interval: 4", "engine: {model: x}", 'engine option "model" is set by collect itself'),
        ("probe_interval: 4", "base: other", 'key "base" is given twice (line 4)'),
        ("base: base", "base: [", "not valid YAML"),
        ("probe_interval: 4", "rollouts: forked", 'task "echo": rollouts: forked needs temperature 0'),
    ],
)
def test_a_mistake_is_one_sentence_that_names_it(folder: Path, old: str, new: str, expected: str) -> None:
    """The sentence names the file, the key's path, and what is allowed."""
    with pytest.raises(InputError) as caught:
        load(folder, GOOD.replace(old, new))
    message = str(caught.value)
    assert expected in message
    assert message.startswith(f"config {folder / 'collect.yaml'}")
    assert "\n" not in message


def test_a_file_that_is_no_mapping_or_not_there_is_told(folder: Path) -> None:
    """An empty file and a missing one are bad input, not a traceback."""
    with pytest.raises(InputError, match="must be a mapping"):
        load(folder, "")
    with pytest.raises(InputError, match="No such file"):
        load_config(folder / "missing.yaml")
