"""The requests of a bench: repeatable, the same in every arm, and spread as asked."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorazor.features.errors import InputError
from lorazor.training.bench_inputs import read_adapters, read_prompts
from lorazor.training.bench_release import ReleaseSteps, parse_steps
from lorazor.training.bench_workload import (
    SPECIAL_TOKENS,
    WORKLOADS,
    Source,
    Workload,
    bodies,
    choice_weights,
    digest,
    draw,
    first_wave,
    workload_of,
)

ADAPTERS = ("a", "b", "c", "d")
SOURCE = Source(vocabulary=1000)
STEPS = ReleaseSteps(1, 0.35, 0.15)


@given(
    name=st.sampled_from(sorted(WORKLOADS)),
    requests=st.integers(1, 40),
    prompt=st.integers(1, 20),
    seed=st.text(max_size=5),
    never=st.floats(0, 1),
)
def test_a_round_is_a_function_of_its_seed(name: str, requests: int, prompt: int, seed: str, never: float) -> None:
    """The same seed draws the same requests, with prompts of the length asked for, clear of special tokens."""
    workload = workload_of(name, {"requests": requests, "prompt_tokens": prompt, "rate": _rate(name)})
    steps = ReleaseSteps(1, 0.35, never)
    asks = draw(workload, ADAPTERS, SOURCE, steps, seed)
    assert asks == draw(workload, ADAPTERS, SOURCE, steps, seed)
    assert len(asks) == requests
    for ask in asks:
        assert len(ask.prompt) == prompt
        assert all(isinstance(t, int) and SPECIAL_TOKENS <= t < 1000 - SPECIAL_TOKENS for t in ask.prompt)
        assert ask.adapter in ADAPTERS


def _rate(name: str) -> float | None:
    return 5.0 if WORKLOADS[name].is_open else None


def test_streams_are_apart() -> None:
    """Another adapter choice or another release distribution leaves the prompts as they were."""
    asks = draw(WORKLOADS["short"], ADAPTERS, SOURCE, STEPS, "0")
    others = draw(workload_of("short", {"choice": "zipf"}), ADAPTERS, SOURCE, None, "0")
    assert [ask.prompt for ask in asks] == [ask.prompt for ask in others]
    assert [ask.adapter for ask in asks] != [ask.adapter for ask in others]
    assert {ask.release_step for ask in others} == {None}


@given(adapters=st.integers(1, 50), exponent=st.floats(0.1, 3))
def test_zipf_weights(adapters: int, exponent: float) -> None:
    """The k-th adapter is asked for k^-exponent times as often as the first; uniform means all alike."""
    zipf = choice_weights(Workload("w", 1, 1, choice="zipf", zipf_exponent=exponent), adapters)
    assert zipf == pytest.approx([(k + 1) ** -exponent for k in range(adapters)])
    assert choice_weights(Workload("w", 1, 1), adapters) == [1.0] * adapters


@pytest.mark.parametrize(("choice", "shares"), [("uniform", [0.25] * 4), ("zipf", [0.48, 0.24, 0.16, 0.12])])
def test_adapters_are_chosen_as_often_as_asked(choice: str, shares: list[float]) -> None:
    """Over many requests each adapter gets its share."""
    workload = workload_of("short", {"choice": choice, "requests": 4000, "prompt_tokens": 1})
    counts = Counter(ask.adapter for ask in draw(workload, ADAPTERS, SOURCE, None, "0"))
    assert [counts[name] / 4000 for name in ADAPTERS] == pytest.approx(shares, abs=0.03)


@given(low=st.integers(1, 50), share=st.floats(0.01, 1), tokens=st.integers(1, 500), seed=st.integers(0, 999))
def test_release_steps_stay_in_their_range(low: int, share: float, tokens: int, seed: int) -> None:
    """Uniform steps lie in [low, share * L]; fixed ones are the step itself; never = 1 releases nobody."""
    random = Random(seed)
    step = ReleaseSteps(low, share, 0).draw(random, tokens)
    assert step is not None
    assert low <= step <= max(low, int(share * tokens))
    assert ReleaseSteps(low, None, 0).draw(random, tokens) == low
    assert ReleaseSteps(low, share, 1).draw(random, tokens) is None


def test_release_steps_give_the_share_of_the_design() -> None:
    """15 % never, else uniform on [1, 0.35 L]: an active-row share of 0.3, every step about as often."""
    random, tokens = Random(0), 256
    steps = [STEPS.draw(random, tokens) for _ in range(20_000)]
    assert steps.count(None) / len(steps) == pytest.approx(0.15, abs=0.01)
    kept = [step for step in steps if step is not None]
    assert (min(kept), max(kept)) == (1, 89)
    share = sum((tokens if step is None else step) - 1 for step in steps) / (len(steps) * (tokens - 1))
    assert share == pytest.approx(0.3, abs=0.01)


def test_another_never_moves_no_other_step() -> None:
    """Requests that release under both distributions do so at the same step."""
    few, many = ([ReleaseSteps(1, 0.5, p).draw(Random(k), 100) for k in range(200)] for p in (0.1, 0.6))
    assert all(a == b for a, b in zip(few, many, strict=True) if b is not None)


@pytest.mark.parametrize("text", ["uniform:1:0.35", "fixed:7"])
def test_parse_steps_takes_its_forms(text: str) -> None:
    """The documented forms are read, and the page's sentence names their numbers."""
    assert all(number in str(parse_steps(text, 0.15)) for number in text.split(":")[1:])


@pytest.mark.parametrize(
    ("text", "never", "words"),
    [
        ("normal:1:2", 0.1, ["--release-steps", "uniform:LOW:SHARE", "normal"]),
        ("uniform:1", 0.1, ["--release-steps", "uniform:1"]),
        ("uniform:0:0.5", 0.1, ["at least 1"]),
        ("uniform:1:1.5", 0.1, ["(0, 1]"]),
        ("uniform:1:nan", 0.1, ["(0, 1]"]),
        ("fixed:x", 0.1, ["fixed:x"]),
        ("fixed:3", 1.5, ["--never", "1.5"]),
        ("fixed:3", float("nan"), ["--never", "nan"]),
    ],
)
def test_parse_steps_refuses(text: str, never: float, words: list[str]) -> None:
    """Anything else is one sentence that names the flag and the value."""
    with pytest.raises(InputError) as caught:
        parse_steps(text, never)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("changes", "load"),
    [
        ({}, (float("inf"), 1.0, 128)),
        ({"arrivals": "staggered", "concurrency": 8}, (float("inf"), 1.0, 8)),
        ({"arrivals": "poisson", "rate": 3.0}, (3.0, 1.0, None)),
        ({"arrivals": "burst", "rate": 3.0, "burstiness": 0.25}, (3.0, 0.25, None)),
    ],
)
def test_arrivals_in_the_generators_words(changes: dict[str, Any], load: tuple[float, float, int | None]) -> None:
    """Closed loops limit concurrency, open ones the rate; Poisson is burstiness 1 whatever --burstiness says."""
    found = workload_of("short", changes).load()
    assert (found["rate"], found["burstiness"], found["concurrency"]) == load


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"requests": 0}, ["--requests", "at least 1", "0"]),
        ({"output_tokens": -1}, ["--output-tokens", "-1"]),
        ({"arrivals": "poisson"}, ["poisson", "--rate"]),
        ({"rate": 3.0}, ["--rate", "closed"]),
        ({"arrivals": "poisson", "rate": 0.0}, ["--rate", "above 0"]),
        ({"arrivals": "poisson", "rate": float("nan")}, ["--rate", "nan"]),
        ({"zipf_exponent": -2.0}, ["--zipf-exponent", "-2"]),
    ],
)
def test_workload_refuses(changes: dict[str, Any], words: list[str]) -> None:
    """A value outside its rule is one sentence that names the flag."""
    with pytest.raises(InputError) as caught:
        workload_of("short", changes)
    assert all(word in str(caught.value) for word in words)


@given(requests=st.integers(1, 60), concurrency=st.integers(1, 40), tokens=st.integers(1, 300))
def test_staggered_requests_end_one_by_one(requests: int, concurrency: int, tokens: int) -> None:
    """The first wave's lengths rise evenly to the full length, which all later requests have."""
    changes = {"arrivals": "staggered", "requests": requests, "concurrency": concurrency, "output_tokens": tokens}
    asks = draw(workload_of("short", changes), ADAPTERS, SOURCE, None, "0")
    lengths = [ask.output_tokens for ask in asks]
    wave = lengths[: min(requests, concurrency)]
    assert wave == sorted(wave)
    assert all(1 <= length <= tokens for length in lengths)
    assert set(lengths[len(wave) - 1 :]) == {tokens}


def test_arms_differ_in_nothing_but_releases() -> None:
    """Bodies of all arms have the same digest; only `vllm_xargs` and names of the run differ."""
    asks = draw(workload_of("short", {"requests": 30}), ADAPTERS, SOURCE, STEPS, "0")
    stock = bodies(asks, "stock-0", fixed=True, release=None)
    released = bodies(asks, "released-0", fixed=True, release="replay")
    never = bodies(asks, "never-0", fixed=True, release="never")
    assert digest(stock) == digest(released) == digest(never)
    assert digest(stock) != digest(bodies(asks, "stock-0", fixed=False, release=None))
    assert all("vllm_xargs" not in body for body in stock)
    assert {body["vllm_xargs"]["lorazor_release"] for body in never} == {"never"}
    steps = [body["vllm_xargs"]["lorazor_release"] for body in released]
    assert steps == [ask.release_step or "never" for ask in asks]
    assert len({body["request_id"] for body in [*stock, *released, *never]}) == 90
    assert {body["cache_salt"] for body in stock}.isdisjoint(body["cache_salt"] for body in released)


def test_prompts_of_a_file(tmp_path: Path) -> None:
    """Every row is used before one comes again; a row may name its adapter."""
    file = tmp_path / "p.jsonl"
    rows = [{"prompt": "one", "adapter": "b"}, {"prompt": "two"}, {"prompt": "three", "adapter": None}]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    read = read_prompts(file, ADAPTERS)
    asks = draw(workload_of("short", {"requests": 6}), ADAPTERS, Source(rows=read), None, "0")
    assert Counter(ask.prompt for ask in asks[:3]) == Counter(["one", "two", "three"])
    assert {ask.adapter for ask in asks if ask.prompt == "one"} == {"b"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["no prompt"]),
        ("{", ["line 1", '"prompt"']),
        ('{"prompt": "x"}\n{"prompt": 3}', ["line 2"]),
        ('{"prompt": "x", "adapter": "z"}', ["line 1", "'z'", "a, b"]),
    ],
)
def test_bad_prompt_files(tmp_path: Path, text: str, words: list[str]) -> None:
    """The sentence names the line and what it must be."""
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(InputError) as caught:
        read_prompts(tmp_path / "p.jsonl", ADAPTERS)
    assert all(word in str(caught.value) for word in words)


def test_adapters_by_name_and_by_folder(tmp_path: Path) -> None:
    """NAME=PATH serves one adapter; a folder alone every adapter folder inside it."""
    for name in ("x", "y", "z"):
        (tmp_path / name).mkdir()
        if name != "z":
            (tmp_path / name / "adapter_config.json").write_text("{}")
    assert list(read_adapters([str(tmp_path)])) == ["x", "y"]
    assert read_adapters([f"n={tmp_path}/x"]) == {"n": f"{tmp_path}/x"}
    for given_ in ([], ["n="], [f"n={tmp_path}/z"], [str(tmp_path / "z")], [f"n={tmp_path}/x", f"n={tmp_path}/y"]):
        with pytest.raises(InputError, match="adapter"):
            read_adapters(given_)


def test_warm_up_is_one_closed_batch() -> None:
    """Whatever the arrivals, a warm-up is at most one full batch without waiting."""
    workload = first_wave(workload_of("burst", {"rate": 2.0, "requests": 500, "concurrency": 16}))
    assert (workload.requests, workload.load()["rate"]) == (16, float("inf"))
