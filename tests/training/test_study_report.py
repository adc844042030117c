"""The report's tables and figures against rows whose numbers are plain to see."""

from collections.abc import Mapping

import pandas as pd
import pytest

from lorazor.training.study.figures import over_share, retention_since
from lorazor.training.study.report import markdown
from lorazor.training.study.tables import curve_table, flip_table, since_table, text_table

CELL = {"backbone": "tiny", "task": "sql", "adapter": "ordinary"}
OTHER = {**CELL, "task": "chat", "adapter": "prompt-only"}
LIMIT = {"loss_kind": "net", "max_drop": 0.05}
KEPT = {"kept": 0.9, "kept_low": 0.8, "kept_high": 0.95}
RETAINED = {"retention": 0.7, "retention_low": 0.5, "retention_high": 0.8}


def frame(*rows: Mapping[str, object]) -> pd.DataFrame:
    """A table of one cell where the rows do not say otherwise."""
    return pd.DataFrame([{**CELL, **row} for row in rows])


def points(axis: object) -> list[tuple[float, float]]:
    """The points of the lines of a panel."""
    return [tuple(xy) for line in axis.get_lines() for xy in line.get_xydata() if line.get_xydata().size]  # type: ignore[attr-defined]


def test_retention_over_the_active_row_share() -> None:
    """Points and band of each cell; a cell whose adapter gains nothing has no panel, and where none does no figure."""
    rows = frame(
        {"policy": "LightGBM", "share": 0.5, **KEPT, **RETAINED},
        {"policy": "LightGBM", "share": 0.1, **KEPT, **RETAINED, "retention": 0.4},
        {**OTHER, "policy": "LightGBM", "share": 0.3, **KEPT},
    )
    (axis,) = over_share(rows, value="retention", label="retention")["tiny"].axes
    assert (axis.get_title(), axis.get_ylabel()) == ("sql, ordinary", "retention")
    assert points(axis) == [(0.1, 0.4), (0.5, 0.7)]
    low, high = axis.collections[0].get_datalim(axis.transData).intervaly
    assert (low, high) == (0.5, 0.8)
    both = over_share(rows, value="kept", label="score kept")["tiny"].axes
    assert [a.get_title() for a in both if a.get_visible()] == ["chat, prompt-only", "sql, ordinary"]
    assert over_share(rows.drop(columns=list(RETAINED)), value="retention", label="retention") == {}


def test_retention_over_the_tokens_since_the_release() -> None:
    """A line for each limit, in the middle of each span, with the band as error bars."""
    rows = frame(
        *({**LIMIT, "tokens_from": a, "tokens_to": b, **RETAINED} for a, b in ((0, 7), (8, 14))),
        {**LIMIT, "max_drop": 0.01, "tokens_from": 2, "tokens_to": 2, **RETAINED, "retention": 0.9},
    )
    (axis,) = retention_since(rows)["tiny"].axes
    lines = {c.get_label(): c for c in axis.containers}
    assert list(lines) == ["net 1%", "net 5%"]
    assert lines["net 5%"][0].get_xydata().tolist() == [[3.5, 0.7], [11.0, 0.7]]
    (bars,) = lines["net 5%"][2]
    assert bars.get_segments()[0][:, 1].tolist() == pytest.approx([0.5, 0.8])
    (above,) = lines["net 1%"][2]
    assert above.get_segments()[0][:, 1].tolist() == pytest.approx([0.5, 0.9])
    assert retention_since(rows.drop(columns="retention")) == {}


def test_the_curves_table_has_the_kept_step() -> None:
    """The best step's metrics, not the last one's."""
    log = (
        (100, "eval_never_loss", 0.2, True),
        (100, "eval_prompt_exact", 0.5, True),
        (200, "eval_never_loss", 0.3, False),
    )
    rows = frame(*({"step": s, "metric": m, "value": v, "best": b} for s, m, v, b in log))
    (row,) = curve_table(rows).to_dict("records")
    assert row == {**CELL, "last step": 200, "kept step": 100, "never_loss": 0.2, "prompt_exact": 0.5}
    assert curve_table(rows.assign(best=False)).empty


def test_the_flip_table_has_the_share_without_one_and_the_first_ones_class() -> None:
    """Over requests, classes over those that flip."""
    seen = ((0, None, None), (2, 4, "digits"), (1, 6, "digits"), (9, 1, "word start"))
    rows = frame(*({"release": 1, "flips": n, "first_flip": at, "token_class": c} for n, at, c in seen))
    (row,) = flip_table(rows).to_dict("records")
    assert (row["n"], row["no flip"], row["median first flip"]) == (4, 0.25, 4)
    assert row["of class"] == "digits 67%, word start 33%"


def test_the_text_table_has_counts_and_shares() -> None:
    """A task without a format has refusals alone; whole numbers stay whole in a column with gaps."""
    rows = frame(
        {"way": "never", "n": 4000, "format": 3000, "refusals": 0},
        {"way": "LightGBM", "n": 4000, "format": 2000, "refusals": 40, **LIMIT, "released": 3210},
        {**OTHER, "way": "never", "n": 8, "refusals": 2},
    )
    lines = markdown(text_table(rows)).splitlines()[2:]
    assert lines == [
        "| tiny | sql | ordinary | never |  |  | 4000 |  | 3000 | 0.75 | 0 | 0 |",
        "| tiny | sql | ordinary | LightGBM | net | 0.05 | 4000 | 3210 | 2000 | 0.5 | 40 | 0.01 |",
        "| tiny | chat | prompt-only | never |  |  | 8 |  |  |  | 2 | 0.25 |",
    ]


def test_older_rows_without_bands_still_have_a_table() -> None:
    """Columns that are not there are empty."""
    rows = frame({"max_drop": 0.05, "tokens_from": 0, "tokens_to": 7, "n": 3, "q_policy": 1.0})
    assert (
        markdown(since_table(rows)).splitlines()[-1]
        == "| tiny | sql | ordinary |  | 0.05 | 0 | 7 | 3 |  |  | 1 |  |  |  |"
    )
