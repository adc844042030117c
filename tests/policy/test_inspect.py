"""What `inspect` says about an artifact and how it draws a score."""

from pathlib import Path

import numpy as np
import pytest

from lorazor.policy.artifact import Artifact
from lorazor.policy.inspect import describe, draw_score
from lorazor.policy.manifest import Guarantee, Manifest, TaskPolicy
from lorazor.policy.scorer import Scorer


def test_describe_says_what_matters(manifest: Manifest, model_txt: str) -> None:
    """Base, adapters, g, thresholds, the promise in words, how it was made, and the leading features are all there."""
    text = describe(Artifact(manifest, Scorer(model_txt), Path("my-policy")))
    for part in (
        "my-policy",
        "bbbbbbbbbbbbbbbb…",
        "probe interval 8 tokens",
        "12 trees, trained on 1 requests",
        "lorazor train traces",
        "sql-lora  (5555555555555555…)  task sql",
        "sql: releases when the score reaches 0.7500 (mean output 23 tokens)",
        "with 90% confidence, the score lost to releasing is at most 5.00% of the never-released score",
        "from 1,500 calibration requests",
        "bound 0.0400",
        "chat: never releases (mean output 100 tokens)",
    ):
        assert part in text
    assert text.index("  entropy  ") > text.index("Most important features")
    without = Artifact(manifest.model_copy(update={"probes": False}), Scorer(model_txt), Path("my-policy"))
    assert "probe interval 8 tokens, for decisions: it never probes" in describe(without)


@pytest.mark.parametrize(("kind", "words"), [("absolute", "0.0200 points"), ("signed", "above the released one")])
def test_each_kind_of_guarantee_has_its_words(manifest: Manifest, model_txt: str, kind: str, words: str) -> None:
    """An absolute and a signed promise are worded as what they are; a threshold set by hand promises nothing."""
    guarantee = Guarantee.model_validate({"kind": kind, "max_drop": 0.02, "confidence": 0.9, "n": 10})
    tasks = {
        "sql": TaskPolicy(threshold=0.5, mean_output_tokens=9.0, guarantee=guarantee),
        "chat": TaskPolicy(threshold=0.5, mean_output_tokens=9.0),
    }
    text = describe(Artifact(manifest.model_copy(update={"tasks": tasks}), Scorer(model_txt), Path("p")))
    assert words in text
    assert "no guarantee" in text.split("chat:")[1].split("sql:")[0]


STEPS = [0, 1, *range(8, 80, 8)]


def test_drawing_shows_where_it_releases() -> None:
    """The first score at the threshold decides, and the release step follows the rule r = c + 2."""
    text = draw_score(STEPS, np.linspace(0.0, 1.0, len(STEPS)), 0.65)
    assert text.endswith("released at step 48 (score 0.700 >= 0.650): release step 50")
    assert draw_score([0, 1], [0.9, 0.1], 0.5).endswith("released at admission (score 0.900 >= 0.500): release step 1")


@pytest.mark.parametrize(
    ("threshold", "verdict"),
    [(None, "never released: the task has no threshold"), (0.95, "the highest score is 0.500, the threshold 0.950")],
)
def test_drawing_of_a_request_that_stays(threshold: float | None, verdict: str) -> None:
    """Without a threshold, or below it, the drawing says that the adapter stays, and why."""
    text = draw_score(STEPS, np.full(len(STEPS), 0.5), threshold)
    assert verdict in text.splitlines()[-1]
    assert ("threshold" in "\n".join(text.splitlines()[:-1])) is (threshold is not None)


def test_drawing_heights() -> None:
    """A column is as high as its score: full at 1, half at 0.5, empty at 0."""
    rows = draw_score([0, 1, 8], [0.0, 0.5, 1.0], None, width=3).splitlines()[:8]
    columns = ["".join(row[6 + k] for row in reversed(rows)).rstrip() for k in range(3)]
    assert columns == ["", "█" * 4, "█" * 8]


@pytest.mark.parametrize("decisions", [1, 30, 1000])
def test_drawing_fits_its_width(decisions: int) -> None:
    """However many decisions there are, the chart keeps to its width, and a narrow peak stays visible."""
    scores = np.zeros(decisions)
    scores[decisions // 2] = 1.0
    rows = draw_score(list(range(decisions)), scores, None, width=40).splitlines()[:9]
    assert max(map(len, rows)) <= 46
    assert any("█" in row for row in rows)


def test_drawing_of_nothing() -> None:
    """An output too short for any decision has a sentence in place of a chart."""
    assert draw_score([], [], 0.5) == "no decision step: the output is too short to release"
