"""Adds what `lorazor bench` measured to a CSV, a row for each round and arm.

    lorazor bench MODEL --adapter ADAPTERS --arrivals poisson --rate 21 --rounds 4 --out bench -- ...
    python benchmarks/latency.py bench/results.json benchmarks/data/latency.csv

The columns are those of vLLM's own load generator, in milliseconds and requests or tokens a second.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path
from typing import Any

from engines import write_rows

MEASURED = (
    *(f"p{p}_{name}_ms" for name in ("ttft", "tpot", "itl") for p in (50, 90, 99)),
    *("request_throughput", "output_throughput", "active_row_share"),
)


def rows_of(results: dict[str, Any]) -> list[dict[str, object]]:
    """The rounds, each with what it was made with."""
    made, versions, workload = results["made_by"], results["made_by"]["versions"], results["workload"]
    about = {name: workload[name] for name in ("arrivals", "rate", "requests", "prompt_tokens", "output_tokens")}
    about |= {"adapters": len(results["adapters"]), "date": made["date"], "git": made["git"][:7]}
    about |= {"gpu": results["machine"]["gpus"][0], "torch": versions["torch"], "vllm": versions["vllm"]}
    about |= {"command": re.sub(r"\S*/", "", made["command"])}
    servers = results["servers"]
    return [
        {"round": found["round"], "arm": found["arm"]}
        | {name: round(found[name], 3) for name in MEASURED}
        | {"kv_blocks": servers["stock" if found["arm"] == "stock" else "lorazor"]["kv_blocks"]}
        | about
        for found in results["rounds"]
    ]


def main() -> None:
    """Read both, write the CSV anew."""
    source, target = map(Path, sys.argv[1:])
    before: list[dict[str, object]] = []
    if target.exists():
        with target.open(newline="") as file:
            before += csv.DictReader(file)
    write_rows(target, [*before, *rows_of(json.loads(source.read_text(encoding="utf-8")))])


if __name__ == "__main__":
    main()
