"""Tables of results: CSV files that grow by cells, are rewritten whole, and say what they hold already."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from lorazor.features.errors import InputError
from lorazor.training.provenance import atomic_write_text


class Results:
    """The rows of one CSV file; a cell whose rows are there is done."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.frame = read_rows(path) if path.exists() else pd.DataFrame()

    def has(self, key: Mapping[str, Any]) -> bool:
        """Whether a row has all of these values."""
        if self.frame.empty or not set(key) <= set(self.frame.columns):
            return False
        return bool((self.frame[list(key)] == pd.Series(dict(key))).all(axis=1).any())

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows, if there are any, and write the file anew: a kill leaves the old file or the new one."""
        new = pd.DataFrame([dict(row) for row in rows])
        if new.empty:
            return
        self.frame = new if self.frame.empty else pd.concat([self.frame, new], ignore_index=True)
        atomic_write_text(self.path, self.frame.to_csv(index=False, lineterminator="\n"))


def read_rows(path: Path) -> pd.DataFrame:
    """A table of results; InputError when it is missing or no CSV file."""
    try:
        return pd.read_csv(path, encoding="utf-8", keep_default_na=False, na_values=[""])
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as CSV: {error}") from None
