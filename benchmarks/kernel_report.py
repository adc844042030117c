"""The table and the summary that benchmarks/kernels.py prints."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Sequence
from math import exp, log
from pathlib import Path
from typing import Any

from lorazor.kernels.plan import DECODE_ROWS

Row = dict[str, Any]  # of the CSV
STOCK = ("stock", "stock, tuned")
SHOWN = 10  # of the paths that were wrong


def read(path: Path) -> list[Row]:
    """The points' rows of an earlier run's CSV, without the tile list's."""
    with path.open(newline="") as file:
        rows: list[Row] = [row for row in csv.DictReader(file) if row["share"]]
    for row in rows:
        row["rows"] = int(row["rows"])
        for number in ("share", "ms", "error"):
            row[number] = float(row[number]) if row[number] else None
    return rows


def point_name(row: Row) -> str:
    """The point of a row."""
    return f"{row['adapters']}x{row['rank']}x{row['rows']}"


def best_stock(rows: Sequence[Row]) -> float | None:
    """Stock's time among rows of one point and share, with whichever configurations suit it better."""
    return min((row["ms"] for row in rows if row["path"] in STOCK and row["ms"] is not None), default=None)


def cell(rows: Sequence[Row], path: str) -> str:
    """`ours/stock ratio` in milliseconds for one share; ours alone where stock launches nothing."""
    found = [row for row in rows if row["path"] == path]
    if not found:
        return "-"
    mine, theirs = found[0]["ms"], best_stock(rows)
    if mine is None:
        return "WRONG"
    return f"{mine:.3g}/{theirs:.3g} {theirs / mine:.1f}x" if theirs else f"{mine:.3g}"


def header(shares: Sequence[float]) -> str:
    """Above the lines."""
    return f"{'ms, ours/stock':18}" + "".join(f"{100 * share:g} %".ljust(17) for share in shares)


def lines(rows: Sequence[Row], shares: Sequence[float]) -> str:
    """One point: a line for ours, and one for each other plan of ours."""
    table = []
    for path in dict.fromkeys(row["path"] for row in rows if row["path"] not in STOCK):
        cells = [cell([row for row in rows if row["share"] == share], path) for share in shares]
        title = point_name(rows[0]) if path == "ours" else path.removeprefix("ours, ")
        table.append(f"{title:18}" + "".join(text.ljust(17) for text in cells))
    return "\n".join(table)


def ratios(rows: Sequence[Row]) -> dict[tuple[str, float], tuple[float, Row]]:
    """Stock's time over ours, and our row, by point and share, where both are right and a row is active."""
    groups: dict[tuple[str, float], list[Row]] = defaultdict(list)
    for row in rows:
        groups[point_name(row), row["share"]].append(row)
    found = {}
    for key, group in groups.items():
        mine, theirs = next(row for row in group if row["path"] == "ours"), best_stock(group)
        if mine["ms"] and theirs:
            found[key] = theirs / mine["ms"], mine
    return found


def summary(rows: Sequence[Row], listed: Sequence[Row]) -> str:
    """Means, extremes, what was wrong, and the tile list's times."""
    found, text = ratios(rows), []
    for kind, is_kind in (("decode", True), ("prefill", False)):
        some = {key: ratio for key, (ratio, row) in found.items() if (row["rows"] <= DECODE_ROWS) == is_kind}
        if some:
            point, share = min(some, key=some.__getitem__)
            mean = exp(sum(map(log, some.values())) / len(some))
            text.append(
                f"{kind}, stock/ours: geometric mean {mean:.2f} over {len(some)} points and shares with active rows, "
                f"least {some[point, share]:.2f} at {point}, {100 * share:g} % active"
            )
    tuned = [row for row in rows if row["path"] == STOCK[1] and row["ms"] is not None]
    default = {(point_name(row), row["share"]): row["ms"] for row in rows if row["path"] == STOCK[0]}
    faster = [row for row in tuned if row["ms"] < (default[point_name(row), row["share"]] or 0.0)]
    if tuned:
        text.append(f"stock is faster tuned at {len(faster)} of {len(tuned)} points and shares; the faster one counts")
    wrong = [row for row in rows if row["ms"] is None]
    text += [
        f"no time, error {row['error']:.2e}: {point_name(row)}, {100 * row['share']:g} % active, {row['path']}"
        for row in wrong[:SHOWN]
    ]
    if len(wrong) > SHOWN:
        text.append(f"and {len(wrong) - SHOWN} more without a time")
    times = ", ".join(f"{row['path'].removeprefix('metadata ')} {1e3 * row['ms']:.0f}" for row in listed)
    text.append(f"tile list of {listed[0]['rows']} rows, microseconds: {times}")
    return "\n".join(text)
