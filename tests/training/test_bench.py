"""Who runs when in a bench, what the records come to, and the page drawn from them; servers are stand-ins."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from lorazor.features.errors import InputError
from lorazor.training.bench import Plan, Server, measure, turns
from lorazor.training.bench_page import caveats, render
from lorazor.training.bench_release import ReleaseSteps
from lorazor.training.bench_results import active_row_share, ratios, report_lines, results_of, same_share, spread
from lorazor.training.bench_workload import Source, workload_of

LATENCY = {f"p{p}_{name}_ms": float(p) for name in ("ttft", "tpot", "itl", "e2el") for p in (50, 90, 99)}


class Fake:
    """A server that answers at once: the stock one 100 tokens a second, the other one twice as many."""

    def __init__(self, name: str, events: list[str], fails: bool = False) -> None:
        self.name, self.events, self.fails = name, events, fails

    def run(
        self, sent: Sequence[dict[str, Any]], *, rate: float, burstiness: float, concurrency: int | None, seed: int
    ) -> dict[str, Any]:
        """What a server would say."""
        self.events.append(sent[0]["request_id"].rpartition("-")[0])
        count, tokens = len(sent), sum(body["max_tokens"] for body in sent)
        speed = 100.0 if self.name == "stock" else 200.0
        steps = [body.get("vllm_xargs", {}).get("lorazor_release") for body in sent]
        return {
            "duration": tokens / speed,
            "completed": 0 if self.fails else count,
            "failed": count if self.fails else 0,
            "errors": ["Traceback\nConnectionError: gone" if self.fails else ""] * count,
            "total_input_tokens": 8 * count,
            "total_output_tokens": tokens,
            "request_throughput": count * speed / tokens,
            "output_throughput": speed,
            "max_concurrent_requests": count,
            "output_lens": [body["max_tokens"] for body in sent],
            "generated_texts": ["text"] * count,
            "itls": [[0.1]] * count,
            "release_steps": [step if isinstance(step, int) else None for step in steps],
            "counters": {"lorazor_slot_waits_total": 3.0} if self.name != "stock" else {},
            "queue_ms": 1.5,
            "memory": {"peak_rss": 2**30, "gpu": None, "gpu_device": None},
            **LATENCY,
        }


def plan_of(**changes: Any) -> Plan:
    """Three rounds of five short requests over two adapters, steps replayed."""
    workload = workload_of("short", {"requests": 5, "concurrency": 2, "prompt_tokens": 8, "output_tokens": 20})
    given: dict[str, Any] = {"steps": ReleaseSteps(1, 0.35, 0.15), **changes}
    return Plan(workload, ("a", "b"), Source(vocabulary=100), **given)


def run_plan(plan: Plan, fails: bool = False) -> tuple[list[dict[str, Any]], list[str]]:
    """All records, and what happened in which order."""
    events: list[str] = []

    @contextmanager
    def start(name: str) -> Iterator[Server]:
        events.append(f"start {name}")
        yield Fake(name, events, fails)
        events.append(f"stop {name}")

    *_, records = measure(plan, start, lambda stage: None)
    return records, events


def test_arms_take_turns() -> None:
    """Both servers stay up, each is warmed up first, and another arm begins each round."""
    records, events = run_plan(plan_of())
    assert events == [
        *("start stock", "warm-up-stock", "start lorazor", "warm-up-lorazor"),
        *("stock-fixed-0", "released-fixed-0", "never-fixed-0"),
        *("released-fixed-1", "never-fixed-1", "stock-fixed-1"),
        *("never-fixed-2", "stock-fixed-2", "released-fixed-2"),
        *("stop lorazor", "stop stock"),
    ]
    assert [record["round"] for record in records] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_one_at_a_time_never_has_two_servers() -> None:
    """Each round starts both, one after the other, in turning order, and every run happens once."""
    records, events = run_plan(plan_of(one_at_a_time=True, natural=True, rounds=2))
    starts = [event for event in events if event.startswith(("start", "stop"))]
    order = ("stock", "lorazor", "lorazor", "stock")
    assert starts == [f"{what} {name}" for name in order for what in ("start", "stop")]
    found = sorted((r["round"], r["arm"], r["length"]) for r in records)
    expected = [turn for number in range(2) for turn in turns(plan_of(natural=True, rounds=2), number)]
    assert found == sorted((t.number, t.arm.name, t.length) for t in expected)


def test_every_arm_of_a_round_gets_the_same_requests() -> None:
    """One digest for all arms of a round and length, another in the next round."""
    records, _ = run_plan(plan_of(natural=True))
    digests = {(r["round"], r["length"]): r["requests_sha256"] for r in records}
    assert all(digests[r["round"], r["length"]] == r["requests_sha256"] for r in records)
    assert len(set(digests.values())) == 6


def test_a_policy_decides_for_itself() -> None:
    """With a policy, the released arm's requests say nothing about releases."""
    asked = {arm.name: arm.release for arm in plan_of(steps=None).arms}
    assert asked == {"stock": None, "released": None, "never": "never"}


def test_a_server_that_answers_nothing_ends_the_bench() -> None:
    """The sentence has the last line of the first error."""
    with pytest.raises(InputError, match="stock server answered none of 2 requests: ConnectionError: gone"):
        run_plan(plan_of(), fails=True)


@pytest.mark.parametrize("one_at_a_time", [False, True])
def test_what_a_round_measured_is_there_before_the_next_begins(one_at_a_time: bool) -> None:
    """So a server that dies in the second round costs that round alone."""

    class Mortal(Fake):
        def run(self, sent: Sequence[dict[str, Any]], **load: Any) -> dict[str, Any]:
            """Nothing more from the second round on."""
            self.fails = sent[0]["request_id"].startswith("never-fixed-1")
            return super().run(sent, **load)

    @contextmanager
    def start(name: str) -> Iterator[Server]:
        yield Mortal(name, [])

    rounds = measure(plan_of(one_at_a_time=one_at_a_time), start, lambda stage: None)
    kept = results_of(next(rounds), about(rounds_run=1))
    with pytest.raises(InputError, match="lorazor server answered none"):
        next(rounds)
    assert [(row["round"], row["arm"]) for row in kept["rounds"]] == [(0, a) for a in ("stock", "released", "never")]


@pytest.mark.parametrize(
    ("steps", "lens", "share"),
    [
        ([None, None], [11, 21], 1.0),
        ([1, 1], [11, 21], 0.0),
        ([6, None], [11, 21], 25 / 30),
        ([6, 3], [11, 0], 0.5),
        ([1], [1], None),
    ],
)
def test_active_row_share(steps: list[int | None], lens: list[int], share: float | None) -> None:
    """The design's definition, over never-released lengths; failed requests and single tokens do not count."""
    assert active_row_share(steps, lens) == (share if share is None else pytest.approx(share))


def test_same_share() -> None:
    """How many texts are equal; nothing is said of empty ones, which a server without a tokenizer sends."""
    assert same_share(["a", "b", "c", "d"], ["a", "b", "x", "d"]) == 0.75
    assert same_share(["", ""], ["", ""]) is None


def test_spread() -> None:
    """Median and range of what is there."""
    assert spread([3.0, None, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}
    assert spread([None]) is None


def test_ratios_are_paired_by_round() -> None:
    """A drift that hits both arms of a round cancels out."""
    rows = [
        {"round": n, "arm": arm, "length": "fixed", **dict.fromkeys(("p50_ttft_ms",), 1.0), "output_throughput": speed}
        for n, drift in enumerate((1.0, 3.0, 0.5))
        for arm, speed in (("stock", 100 * drift), ("released", 150 * drift))
    ]
    for row in rows:
        row.update({key: row.get(key, 1.0) for key in ("request_throughput", "mean_output_tokens", *LATENCY)})
    (found,) = ratios(rows)
    assert found["output_throughput"] == {"median": 1.5, "min": 1.5, "max": 1.5}


def about(**changes: Any) -> dict[str, Any]:
    """The part of a small results.json that does not come from rounds."""
    server = {"command": "python <x>", "environment": {}, "own_options": [], "kv_blocks": 1000, "start_seconds": 30.0}
    return {
        "made_by": {"command": "lorazor bench", "date": "2026-01-01", "git": "abc", "versions": {"vllm": "1"}},
        "machine": {"system": "Linux", "cpus": 2, "gpus": []},
        "model": "models/<base>",
        "dummy_weights": True,
        "adapters": {name: {"path": name, "rank": 8, "requests": 5} for name in "ab"},
        "workload": {"name": "short", "arrivals": "closed", "requests": 5, "prompts": "random tokens"},
        "release": {"kind": "replayed", "steps": "sometimes", "policy": None},
        "rounds_run": 3,
        "one_at_a_time": False,
        "servers": {"stock": server, "lorazor": server},
        **changes,
    }


@pytest.fixture
def results() -> dict[str, Any]:
    """A small recorded results.json, with both lengths."""
    records, _ = run_plan(plan_of(natural=True))
    recorded: dict[str, Any] = json.loads(json.dumps(results_of(records, about())))
    return recorded


def test_results_keep_what_is_documented(results: dict[str, Any]) -> None:
    """Six summaries, four ratios, a record for each run; texts and single token times are left out."""
    assert len(results["summary"]) == 6
    assert [(row["length"], row["arm"]) for row in results["ratios"]] == [
        *(("fixed", "released"), ("fixed", "never"), ("natural", "released"), ("natural", "never"))
    ]
    assert results["ratios"][0]["output_throughput"] == {"median": 2.0, "min": 2.0, "max": 2.0}
    assert len(results["rounds"]) == 18
    for record in results["rounds"]:
        assert record.keys().isdisjoint({"generated_texts", "itls"})
        expected = 1.0 if record["arm"] != "released" else active_row_share(record["release_steps"], [20] * 5)
        assert record["active_row_share"] == expected
    assert "2.00 x stock's tokens/s" in report_lines(results)[1]


def test_page_stands_alone_and_says_what_it_is(results: dict[str, Any]) -> None:
    """No outside file, escaped text, four figures, ratios, the replayed distribution and the caveats."""
    page = render(results)
    assert page.count("<svg") == 4
    assert not re.search(r"""(?:src|href)=["'](?!#)""", page)
    assert "models/&lt;base&gt;" in page
    assert "<b>2.00" in page
    assert "Replayed from a distribution, not decided by a policy: sometimes" in page
    assert "lorazor_slot_waits_total" in page
    for sentence in ("dummy weights", "CPU", "took turns", "random tokens"):
        assert sentence in page


def test_page_is_a_function_of_the_results(results: dict[str, Any]) -> None:
    """The same JSON gives the same page."""
    assert render(results) == render(results)


def test_caveats_follow_the_run(results: dict[str, Any]) -> None:
    """A real policy on a GPU over real prompts has few; a failed request is always one."""
    clean = about(
        dummy_weights=False,
        machine={"system": "Linux", "cpus": 2, "gpus": ["GPU"]},
        workload={"name": "mixed", "arrivals": "poisson", "requests": 5, "prompts": "p.jsonl"},
        release={"kind": "policy", "policy": "policy/"},
        one_at_a_time=True,
    )
    assert list(caveats({**results, **clean})) == []
    results["summary"][0]["failed"] = 2
    assert ["2 requests failed" in caveat for caveat in caveats({**results, **clean})] == [True]
