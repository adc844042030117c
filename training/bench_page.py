"""The page of a bench, drawn from its results.json alone: one HTML file with nothing outside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

TEMPLATE = "bench_page.html.j2"
ROWS = {
    "request_throughput": "requests/s",
    "output_throughput": "output tokens/s",
    "mean_output_tokens": "output tokens a request",
    **{f"p{p}_{name}_ms": f"{name.upper()} p{p}, ms" for name in ("ttft", "tpot", "itl") for p in (50, 90, 99)},
}
FEW_ROUNDS = 3


def render(results: Mapping[str, Any]) -> str:
    """The page as text."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    from lorazor.training.bench_figures import LABELS, draw_all

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "percent": percent, "gib": gib}
    return environment.get_template(TEMPLATE).render(
        r=results,
        labels=LABELS,
        rows=ROWS,
        tables=tables(results),
        caveats=list(caveats(results)),
        servers=servers(results),
        figures={name: Markup(svg) for name, svg in draw_all(results).items()},
    )


def tables(results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By output length: the summary of each arm, and the ratios of each arm but stock."""
    return {
        length: {
            "arms": {row["arm"]: row for row in results["summary"] if row["length"] == length},
            "ratios": {row["arm"]: row for row in results["ratios"] if row["length"] == length},
        }
        for length in dict.fromkeys(row["length"] for row in results["summary"])
    }


def servers(results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What is known of each server, with its memory at the last round and its slot waits, if it counts them."""
    found = {}
    for name, about in results["servers"].items():
        mine = [r for r in results["rounds"] if (r["arm"] == "stock") == (name == "stock")]
        waits = {key: value for r in mine for key, value in r["counters"].items() if key.startswith("lorazor_slot")}
        found[name] = {**about, "memory": mine[-1]["memory"], "slot_waits": waits}
    return found


def caveats(results: Mapping[str, Any]) -> Iterator[str]:
    """What a reader must know before quoting a figure, one sentence at a time."""
    release, workload, summary = results["release"], results["workload"], results["summary"]
    if release["kind"] == "replayed":
        yield f"No policy decided here: release steps were replayed from a distribution ({release['steps']})."
    if results["dummy_weights"]:
        yield "The base has dummy weights: speeds are real, texts and natural lengths mean nothing."
    if workload["prompts"] == "random tokens":
        yield "Prompts are random tokens: with natural length, where an answer ends says little about real use."
    if not any(row["length"] == "natural" for row in summary):
        yield "Output lengths were fixed: speed alone. A base that rambles after a release would cost more than this."
    if workload["arrivals"] == "closed":
        yield "Closed loop with equal lengths: requests start and end in step, so releases come in waves."
    if not results["machine"]["gpus"]:
        yield "Measured on a CPU: this tries the bench out and says nothing about a GPU."
    if results["servers"]["stock"]["own_options"]:
        yield f"Stock had options of its own: {' '.join(results['servers']['stock']['own_options'])}."
    if not results["one_at_a_time"]:
        yield "Both servers were up at once and took turns; memory of the whole GPU includes both."
    if results["rounds_run"] < FEW_ROUNDS:
        yield f"Only {results['rounds_run']} round(s): the span from the smallest to the largest value means little."
    failed = sum(row["failed"] for row in summary)
    if failed:
        yield f"{failed} requests failed: their arms did less work than the others; do not quote this run."


def number(value: float | None) -> str:
    """Three significant digits, whole numbers in full."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def percent(value: float | None) -> str:
    """0.513 as "51.3 %"; a null is a dash."""
    return "–" if value is None else f"{100 * value:.1f} %"


def gib(value: int | None) -> str:
    """Bytes as GiB; a null is a dash."""
    return "–" if value is None else f"{value / 2**30:.1f} GiB"
