"""Atomic writes leave the old or the new and nothing else; what is not known is "unknown"."""

import os
from pathlib import Path

import pytest

from lorazor.training.provenance import atomic_folder, atomic_path, atomic_write_text, git_sha, made_by, versions


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    """An exception half-way leaves the earlier content and no temporary file."""
    path = tmp_path / "deep" / "file.txt"
    atomic_write_text(path, "old")
    with pytest.raises(ZeroDivisionError), atomic_path(path) as temporary:
        temporary.write_text(f"half {1 / 0}")
    assert path.read_text() == "old"
    assert os.listdir(path.parent) == ["file.txt"]
    atomic_write_text(path, "new")
    assert path.read_text() == "new"


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    """The new folder takes the old one's place with none of its files; a failure changes nothing."""
    target = tmp_path / "out"
    with atomic_folder(target) as draft:
        (draft / "a").write_text("1")
    with pytest.raises(ZeroDivisionError), atomic_folder(target) as draft:
        (draft / "b").write_text(f"half {1 / 0}")
    assert os.listdir(tmp_path) == ["out"]
    assert os.listdir(target) == ["a"]
    with atomic_folder(target) as draft:
        (draft / "c").write_text("3")
    assert os.listdir(tmp_path) == ["out"]
    assert os.listdir(target) == ["c"]


def test_versions_leave_out_what_is_not_installed() -> None:
    """Python and installed packages have a version, others no entry."""
    found = versions(("numpy", "no-such-package-at-all"))
    assert set(found) == {"python", "numpy"}


def test_no_checkout_is_unknown(tmp_path: Path) -> None:
    """Outside of git the commit is "unknown" rather than an error."""
    assert git_sha(tmp_path) == "unknown"
    assert git_sha(tmp_path / "not there") == "unknown"


def test_made_by_says_how() -> None:
    """Command, date, commit and versions are there, and what the caller adds."""
    made = made_by(seed=3)
    assert made["seed"] == 3
    assert {"command", "date", "git", "versions"} <= made.keys()
    assert "/" not in made["command"].split()[0]
