"""The pure parts of the demo: which text was made with the adapter, what a promise says, and the page of the report."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jinja2
import pytest

from examples.demo_report import percent, promise, render
from examples.demo_requests import Answer, Exchange, active_row_share, split_at_release


def decode(ids: Sequence[int]) -> str:
    """A tokenizer of one token per byte; 0 ends a text and is never shown."""
    return bytes(i for i in ids if i).decode("utf-8", errors="replace")


def answer(text: str, release_step: int | None) -> Answer:
    """An answer of one token per byte and an end token."""
    return Answer(text, (*text.encode(), 0), release_step)


@pytest.mark.parametrize(
    ("text", "release_step", "parts"),
    [
        ("BX4 | note", 1, ("B", "X4 | note")),
        ("BX4 | note", 5, ("BX4 |", " note")),
        ("BX4 | note", None, ("BX4 | note", "")),
        ("abc", 4, ("abc", "")),
        ("é!", 1, ("", "é!")),
        ("é!", 2, ("é", "!")),
        ("\ufffdx", 3, ("\ufffd", "x")),
        ("", 1, ("", "")),
    ],
)
def test_text_is_split_at_the_release_step(text: str, release_step: int | None, parts: tuple[str, str]) -> None:
    """The first r tokens are the adapter's; a character cut in two is the base's; nothing is lost."""
    assert split_at_release(answer(text, release_step), decode) == parts


def test_text_of_another_decoder_is_not_made_up() -> None:
    """Where the decoded start is not the start of the streamed text, the whole text is kept, as the base's."""
    assert split_at_release(Answer("Other", (1, 2, 3), 2), lambda ids: "abc") == ("", "Other")


def exchange(text: str, release_step: int | None, never: str, policy_score: float = 1.0) -> Exchange:
    """A request as the demo keeps it; never released it scores 1."""
    released = answer(text, release_step)
    before, after = split_at_release(released, decode)
    return Exchange("sql", "a <prompt> & more", released, answer(never, None), before, after, policy_score, 1.0)


def test_active_row_share_counts_decode_rows_of_the_never_released_answer() -> None:
    """(r - 1) over (L - 1), summed: 2 of 10 held rows here, and all of the request that kept its adapter."""
    released, kept = exchange("abcdefghij", 3, "abcdefghij"), exchange("abcde", None, "abcde")
    assert active_row_share([released]) == pytest.approx(2 / 10)
    assert active_row_share([released, kept]) == pytest.approx((2 + 5) / (10 + 5))
    assert active_row_share([]) == 1.0


TUNED: dict[str, Any] = {
    "threshold": 0.5, "max_drop": 0.05, "confidence": 0.9, "bound": 0.03, "n": 1800, "drop": 0.0162,
    "q_base": 0.125, "q_adapter": 0.875, "q_policy": 0.861, "active_row_share": 0.4321, "length_ratio": 1.0,
}  # fmt: skip


def test_promise_says_loss_confidence_and_requests() -> None:
    """A tuned threshold is told with its confidence, its max drop, what was seen and from how many requests."""
    sentence = promise(TUNED)
    assert all(part in sentence for part in ("90 % confidence", "at most 5 %", "1,800", "1.6 %", "3.0 %"))


def test_promise_of_never_and_of_a_threshold_by_hand() -> None:
    """No threshold means never; a threshold without a max drop promises nothing."""
    assert "never releases" in promise({**TUNED, "threshold": None})
    assert "nothing is promised" in promise({"threshold": 0.5, "n": 10})


def test_percent_of_null_is_a_dash() -> None:
    """What means nothing is not shown as a number."""
    assert (percent(0.0512), percent(0.05, 0), percent(None)) == ("5.1 %", "5 %", "–")


def page(**changes: Any) -> str:
    """The report of two requests, one of them harmed by its release."""
    good, harmed = exchange("fine <b>", 2, "fine <b>"), exchange("wrong", 3, "right", policy_score=0.0)
    row = {
        "name": "all", "requests": 2, "released": 2, "same": 1, "policy_score": 0.5, "never_score": 1.0, "share": 0.25
    }  # fmt: skip
    values: dict[str, Any] = {
        "figures": {"retention": "<svg>R</svg>", "steps": "<svg>S</svg>", "reliability": "<svg>C</svg>"},
        "tuned": {"sql": TUNED}, "tested": {"sql": {**TUNED, "threshold": None}}, "max_drop": 0.05, "model": "M",
        "machine": "2 CPU cores", "exchanges": [good, harmed], "compared": [row], "live": row, "policy_seconds": 2.5,
        "never_seconds": 3.5, "speed_note": "no measure of speed", "metrics": ['lorazor_rows_total{a="b"} 1.0'],
        "timings": [("train", 12.0)], "commands": ["lorazor train a b"], **changes,
    }  # fmt: skip
    return render(**values)


def test_report_stands_alone() -> None:
    """No script, no link and no address of anything outside the page."""
    html = page()
    assert html.startswith("<!doctype html>")
    assert not re.search(r"<(script|link|img|iframe)\b|https?://|url\(", html)


def test_report_marks_both_parts_of_a_text_and_escapes_it() -> None:
    """The adapter's part, then the base's, each in its own style; model text is never taken for markup."""
    html = page()
    expected = '<span class="adapter">fi</span><span class="cut">▸</span><span class="base">ne &lt;b&gt;</span>'
    assert expected in html
    assert "a &lt;prompt&gt; &amp; more" in html
    assert "<svg>R</svg>" in html


def test_report_shows_what_a_release_harmed() -> None:
    """A request whose score fell is marked and shows the never-released text; the others do not."""
    html = page()
    assert html.count('class="wrong"') == 1
    assert html.count(">never released</summary>") == 1
    assert '<div class="answer">right</div>' in html


def test_report_says_never_for_a_task_without_a_threshold() -> None:
    """A null threshold is shown in the design's word."""
    assert re.search(r"<td>never</td>", page())


def test_report_refuses_a_missing_value() -> None:
    """A figure that was not drawn is an error, not an empty place."""
    with pytest.raises(jinja2.UndefinedError, match="retention"):
        page(figures={})
