"""The figures of a bench, as `<svg>` elements for its page."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

COLOURS = {"stock": "#64748b", "released": "#0e7490", "never": "#c2560c"}
LABELS = {"stock": "stock vLLM", "released": "LoRazor, released", "never": "LoRazor, never released"}
BINS = 40


def draw_all(results: Mapping[str, Any]) -> dict[str, str]:
    """Figures by name: throughput, latency, release_steps and output_tokens."""
    drawn = {
        "throughput": throughput(results["summary"]),
        "latency": latency(results["summary"]),
        "release_steps": release_steps(results["rounds"]),
        "output_tokens": output_tokens(results["rounds"]),
    }
    return {name: to_svg(figure) for name, figure in drawn.items()}


def to_svg(figure: Any) -> str:
    """The `<svg>` element, with text as text and no date, so that the same data give the same page."""
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "lorazor"}):
        figure.savefig(out, format="svg", bbox_inches="tight", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def throughput(summary: Sequence[Mapping[str, Any]]) -> Any:
    """Requests and output tokens per second: medians over rounds, whiskers from the smallest to the largest."""
    figure, axes = _panels(2)
    for axis, name, title in zip(
        axes, ("request_throughput", "output_throughput"), ("requests/s", "output tokens/s"), strict=True
    ):
        places = [f"{row['length']}\n{row['arm']}" for row in summary]
        values = [row[name]["median"] for row in summary]
        whiskers = [
            [row[name]["median"] - row[name]["min"] for row in summary],
            [row[name]["max"] - row[name]["median"] for row in summary],
        ]
        axis.bar(places, values, yerr=whiskers, capsize=4, color=[COLOURS[row["arm"]] for row in summary])
        axis.set_title(title)
    return figure


def latency(summary: Sequence[Mapping[str, Any]]) -> Any:
    """TTFT, TPOT and ITL over percentile, on a logarithmic axis; natural lengths are dashed."""
    figure, axes = _panels(3)
    percentiles = (50, 90, 99)
    for axis, metric in zip(axes, ("ttft", "tpot", "itl"), strict=True):
        for row in summary:
            values = [(row[f"p{p}_{metric}_ms"] or {"median": float("nan")})["median"] for p in percentiles]
            line = {"color": COLOURS[row["arm"]], "linestyle": "-" if row["length"] == "fixed" else "--"}
            axis.plot([f"p{p}" for p in percentiles], values, marker="o", label=_label(row), **line)
        axis.set_yscale("log")
        axis.set_title(f"{metric.upper()}, ms")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize="small", loc="outside lower center", ncols=3)
    return figure


def release_steps(rounds: Sequence[Mapping[str, Any]]) -> Any:
    """How many requests let go at each step."""
    figure, (axis,) = _panels(1)
    mine = [record for record in rounds if record["arm"] == "released"]
    steps = [step for record in mine for step in record["release_steps"] if step is not None]
    if steps:
        width = -(-max(steps) // BINS)
        axis.hist(steps, bins=range(1, max(steps) + width + 1, width), color=COLOURS["released"])
    asked = sum(len(record["release_steps"]) for record in mine)
    axis.set(title=f"{len(steps)} of {asked} requests released", xlabel="release step", ylabel="requests")
    return figure


def output_tokens(rounds: Sequence[Mapping[str, Any]]) -> Any:
    """How long the answers were, by arm; where the model ends them if that was measured."""
    figure, (axis,) = _panels(1)
    length = "natural" if any(record["length"] == "natural" for record in rounds) else "fixed"
    for arm, colour in COLOURS.items():
        mine = [record for record in rounds if (record["arm"], record["length"]) == (arm, length)]
        tokens = sorted(tokens for record in mine for tokens in record["output_lens"])
        if tokens:
            share = [place / len(tokens) for place in range(len(tokens) + 1)]
            axis.step([tokens[0], *tokens], share, where="post", color=colour, label=LABELS[arm])
    axis.set(title=f"{length} length", xlabel="output tokens", ylabel="share of answers up to this length")
    axis.legend(fontsize="x-small")
    return figure


def _label(row: Mapping[str, Any]) -> str:
    return LABELS[row["arm"]] + (", natural length" if row["length"] == "natural" else "")


def _panels(count: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * max(count, 1.4), 3.2), layout="constrained")
    axes = figure.subplots(1, count, squeeze=False)[0]
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
    return figure, axes
