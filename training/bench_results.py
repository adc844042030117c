"""From the records of a bench to what is written: shares by the design's definition, summaries and paired ratios."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

Record = dict[str, Any]
FORMAT_VERSION = 1
LATENCIES = tuple(f"p{p}_{name}_ms" for name in ("ttft", "tpot", "itl") for p in (50, 90, 99))
# What is summed up over rounds, beside the ratio to stock in the same round.
MEASURES = ("request_throughput", "output_throughput", "mean_output_tokens", *LATENCIES)
# Of vLLM's result and ours, what a record keeps as it is; lists hold one entry for each request.
KEPT = (
    *("round", "arm", "length", "requests_sha256", "adapters", "duration", "completed", "failed", "errors"),
    *("total_input_tokens", "total_output_tokens", "request_throughput", "output_throughput", *LATENCIES),
    *("p50_e2el_ms", "p90_e2el_ms", "p99_e2el_ms", "max_concurrent_requests", "output_lens", "release_steps"),
    *("queue_ms", "counters", "memory"),
)


def results_of(records: Sequence[Record], about: Mapping[str, Any]) -> dict[str, Any]:
    """The whole of results.json: `about` (provenance, workload, servers), the rounds, and what they come to."""
    rounds = finished(records)
    return {
        "format_version": FORMAT_VERSION,
        **about,
        "summary": summaries(rounds),
        "ratios": ratios(rounds),
        "rounds": rounds,
    }


def finished(records: Sequence[Record]) -> list[Record]:
    """Each record as it is kept, with what only its neighbours of the same round and length can tell."""
    groups: dict[tuple[int, str], dict[str, Record]] = {}
    for record in records:
        groups.setdefault((record["round"], record["length"]), {})[record["arm"]] = record
    kept = []
    for record in records:
        group = groups[record["round"], record["length"]]
        never = group.get("never", record)
        more = {
            "mean_output_tokens": record["total_output_tokens"] / max(1, record["completed"]),
            "active_row_share": active_row_share(record["release_steps"], never["output_lens"]),
            "same_text_as_stock": same_share(record["generated_texts"], group["stock"]["generated_texts"]),
            "length_ratio": record["total_output_tokens"] / max(1, never["total_output_tokens"]),
        }
        kept.append({key: record[key] for key in KEPT if key in record} | more)
    return kept


def active_row_share(release_steps: Sequence[int | None], never_lens: Sequence[int]) -> float | None:
    """Sum of r - 1 over sum of L - 1: L = never-released output length, r = L where not released.

    None where no request made a second token. Requests that failed (L = 0) are left out.
    """
    rows = [(step or length, length) for step, length in zip(release_steps, never_lens, strict=True) if length]
    total = sum(length - 1 for _, length in rows)
    return sum(min(step, length) - 1 for step, length in rows) / total if total else None


def same_share(texts: Sequence[str], others: Sequence[str]) -> float | None:
    """Share of requests that got the same text; None where a server without a tokenizer gave none."""
    if not any(texts):
        return None
    return sum(a == b for a, b in zip(texts, others, strict=True)) / len(texts)


def summaries(rounds: Sequence[Record]) -> list[Record]:
    """Median, smallest and largest value over rounds of every measure, by arm and length."""
    found = []
    for length, arm in _pairs(rounds):
        mine = [record for record in rounds if (record["length"], record["arm"]) == (length, arm)]
        names = (*MEASURES, "active_row_share", "same_text_as_stock", "length_ratio", "queue_ms")
        spreads = {name: spread(record.get(name) for record in mine) for name in names}
        counts = {name: sum(record[name] for record in mine) for name in ("completed", "failed")}
        found.append({"length": length, "arm": arm, **counts, **spreads})
    return found


def ratios(rounds: Sequence[Record]) -> list[Record]:
    """Every measure over stock's of the same round, so that what drifts between rounds cancels out."""
    stock = {(r["round"], r["length"]): r for r in rounds if r["arm"] == "stock"}
    found = []
    for length, arm in _pairs(rounds):
        if arm == "stock":
            continue
        mine = [record for record in rounds if (record["length"], record["arm"]) == (length, arm)]
        pairs = [(record, stock[record["round"], length]) for record in mine]
        spreads = {name: spread(a[name] / b[name] for a, b in pairs if b[name]) for name in MEASURES}
        found.append({"length": length, "arm": arm, "over": "stock", **spreads})
    return found


def _pairs(rounds: Sequence[Record]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((r["length"], r["arm"]) for r in sorted(rounds, key=_place)))


def _place(record: Record) -> tuple[str, int]:
    return record["length"], ("stock", "released", "never").index(record["arm"])


def spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """Median, min and max of what is there; None where nothing is."""
    there = [value for value in values if value is not None]
    return {"median": median(there), "min": min(there), "max": max(there)} if there else None


def report_lines(results: Mapping[str, Any]) -> list[str]:
    """What the terminal is told: throughput of each arm, and its ratio to stock, smallest and largest in brackets."""
    over = {(row["length"], row["arm"]): row for row in results["ratios"]}
    lines = []
    for row in results["summary"]:
        speed = (
            f"{row['output_throughput']['median']:.1f} output tokens/s, {row['request_throughput']['median']:.3g} req/s"
        )
        line = f"{row['length']} length, {row['arm']}: {speed}"
        if (row["length"], row["arm"]) in over:
            ratio = over[row["length"], row["arm"]]["output_throughput"]
            line += f", {ratio['median']:.2f} x stock's tokens/s ({ratio['min']:.2f} to {ratio['max']:.2f})"
        lines.append(line + (f"; {row['failed']} requests FAILED" if row["failed"] else ""))
    return lines
