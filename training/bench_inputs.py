"""What `lorazor bench` reads before it starts: adapters from the command line, prompts from a file."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from lorazor.features.errors import InputError

CONFIG = "adapter_config.json"


def read_adapters(given: Sequence[str]) -> dict[str, str]:
    """Folders by the name they are served under, from `NAME=PATH`, or from a folder that holds adapter folders.

    Raises:
        InputError: none is given, a name twice, or a folder that holds no adapter.
    """
    found: dict[str, str] = {}
    for text in given:
        for name, path in _adapters_of(text):
            if name in found:
                raise InputError(f"--adapter: the name {name!r} is there twice")
            if not (Path(path) / CONFIG).is_file():
                raise InputError(f"--adapter {name}={path}: the folder does not exist or holds no {CONFIG}")
            found[name] = path
    if not found:
        raise InputError("no adapter: --adapter NAME=PATH, once for each of them")
    return found


def _adapters_of(text: str) -> Iterator[tuple[str, str]]:
    name, equals, path = text.partition("=")
    if equals:
        if not name or not path:
            raise InputError(f"--adapter must be NAME=PATH or a folder of adapters, got {text!r}")
        yield name, str(Path(path).expanduser())
        return
    folder = Path(text).expanduser()
    inside = sorted(file.parent for file in folder.glob(f"*/{CONFIG}"))
    if not inside:
        raise InputError(f"--adapter {text}: no NAME=PATH, and no folder that holds adapter folders")
    yield from ((path.name, str(path)) for path in inside)


def read_prompts(file: Path, adapters: Collection[str]) -> tuple[dict[str, str], ...]:
    """Rows {"prompt": text, "adapter": name or absent} of a JSONL file.

    Raises:
        InputError: no such file, or a line that is something else.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--prompts {file}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    rows = tuple(_row(line, f"{file}, line {number}", adapters) for number, line in enumerate(lines, 1) if line.strip())
    if not rows:
        raise InputError(f"--prompts {file}: holds no prompt")
    return rows


def _row(line: str, where: str, adapters: Collection[str]) -> dict[str, str]:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str) or not row["prompt"]:
        raise InputError(f'{where}: must be a JSON object with a "prompt", got {line[:60]!r}')
    adapter = row.get("adapter")
    if adapter is not None and adapter not in adapters:
        raise InputError(f"{where}: no adapter {adapter!r} is given; there are {', '.join(sorted(adapters))}")
    return {"prompt": row["prompt"]} | ({} if adapter is None else {"adapter": adapter})
