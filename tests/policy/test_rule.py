"""The release rule: who may release, and at which decision they do."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorazor.features.errors import InputError
from lorazor.features.grid import decision_steps, release_grid, release_step
from lorazor.policy.rule import Choice, Options, ReleaseRule, choose, parse_options

SETTINGS: dict[str, Any] = {
    "pinned": False,
    "has_policy": True,
    "knows_adapter": True,
    "adapter_task": "sql",
    "thresholds": {"sql": 0.9, "chat": None},
    "release_fraction": 1.0,
}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (None, Options()),
        ({"other": 1}, Options()),
        ({"lorazor_release": "never"}, Options(release="never")),
        ({"lorazor_release": 3}, Options(release=3)),
        ({"lorazor_release": "3"}, Options(release=3)),
        ({"lorazor_threshold": 1}, Options(threshold=1.0)),
        ({"lorazor_task": "sql"}, Options(task="sql")),
    ],
)
def test_options_are_read(given: dict[str, Any] | None, wanted: Options) -> None:
    """The keys of a request's extra arguments, and only ours."""
    assert parse_options(given) == wanted


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"lorazor_relase": 1}, "lorazor_relase is not an option"),
        ({"lorazor_release": 0}, "at least 1, got 0"),
        ({"lorazor_release": True}, "got True"),
        ({"lorazor_release": 2.5}, "got 2.5"),
        ({"lorazor_threshold": 1.01}, r"in \[0, 1\], got 1.01"),
        ({"lorazor_threshold": float("nan")}, "got nan"),
        ({"lorazor_threshold": "high"}, "got 'high'"),
        ({"lorazor_task": 7}, "must be a string, got 7"),
    ],
)
def test_bad_options_are_told(given: dict[str, Any], sentence: str) -> None:
    """The sentence names the key, its rule and the value."""
    with pytest.raises(InputError, match=sentence):
        parse_options(given)


@pytest.mark.parametrize(
    ("options", "settings", "choice"),
    [
        (Options(), {}, Choice("policy", "sql", threshold=0.9)),
        (Options(task="chat"), {}, Choice("policy", "chat", threshold=None)),
        (Options(threshold=0.5), {}, Choice("policy", "sql", threshold=0.5)),
        (Options(task="poetry"), {}, Choice("unknown_task", "poetry")),
        (Options(), {"knows_adapter": False, "adapter_task": None}, Choice("unknown_adapter")),
        (Options(), {"adapter_task": None}, Choice("unknown_task")),
        (Options(task="sql"), {"adapter_task": None}, Choice("policy", "sql", threshold=0.9)),
        (Options(), {"has_policy": False}, Choice("no_policy", "sql")),
        (Options(), {"release_fraction": 0.0}, Choice("control", "sql")),
        (Options(threshold=0.5), {"release_fraction": 0.0}, Choice("control", "sql")),
        (Options(release=4), {"release_fraction": 0.0}, Choice("forced", "sql", forced=4)),
        (Options(release="never"), {}, Choice("never", "sql")),
        (Options(release=4), {"pinned": True}, Choice("pinned", "sql")),
        (Options(threshold=0.0), {"pinned": True}, Choice("pinned", "sql")),
    ],
)
def test_admission_settles_what_may_happen(options: Options, settings: dict[str, Any], choice: Choice) -> None:
    """Pinned before the request's wish, that before the policy, and the release fraction limits the policy alone."""
    assert choose(options, "id", **{**SETTINGS, **settings}) == choice


@given(
    length=st.integers(2, 80),
    interval=st.integers(1, 9),
    threshold=st.floats(0, 1),
    data=st.data(),
)
def test_release_at_the_first_decision_that_reaches_the_threshold(
    length: int, interval: int, threshold: float, data: st.DataObject
) -> None:
    """For any scores: one release at most, on the grid, at the first score that reaches the threshold."""
    scores = {c: data.draw(st.floats(0, 1)) for c in decision_steps(length, interval)}
    rule = ReleaseRule(interval)
    rule.admit("r", Choice("policy", "t", threshold=threshold))
    released = [
        (c, r) for c in range(length) if rule.wants_score("r", c) for r in [rule.decide("r", c, scores.get(c))] if r
    ]
    reached = [c for c, score in scores.items() if score >= threshold]
    assert released == [(c, release_step(c)) for c in reached[:1]]
    assert rule.released("r") in [None, *release_grid(length, interval)]


def test_no_score_no_release() -> None:
    """A failed policy gives None: the request keeps its adapter, even at a threshold of 0."""
    rule = ReleaseRule(4)
    rule.admit("r", Choice("policy", "t", threshold=0.0))
    assert rule.decide("r", 0, None) is None
    assert rule.decide("r", 1, 0.0) == 3


def test_forced_never_and_unknown_requests() -> None:
    """A forced step is given at admission; requests without threshold, and unknown ones, are never released."""
    rule = ReleaseRule(None)
    rule.admit("forced", Choice("forced", forced=7))
    rule.admit("never", Choice("never"))
    assert rule.decide("forced", 0, None) == 7
    assert rule.decide("forced", 1, None) is None
    assert rule.decide("never", 0, 1.0) is None
    assert rule.decide("nobody", 0, 1.0) is None
    rule.forget("forced")
    assert rule.released("forced") is None
