"""Rows of benchmarks/data/latency.csv from what `lorazor bench` wrote: a row for each round and arm.

lorazor bench MODEL --adapter ADAPTERS --arrivals poisson --rate 21 --rounds 4 --out bench -- ...
python benchmarks/latency.py bench/results.json >> benchmarks/data/latency.csv
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

MEASURED = (
    *(f"p{p}_{name}_ms" for name in ("ttft", "tpot", "itl") for p in (50, 90, 99)),
    *("request_throughput", "output_throughput", "active_row_share"),
)


def rows_of(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The rounds, each with what it was made with."""
    made, versions, workload = results["made_by"], results["made_by"]["versions"], results["workload"]
    about = {name: workload[name] for name in ("arrivals", "rate", "requests", "prompt_tokens", "output_tokens")}
    about |= {"adapters": len(results["adapters"]), "date": made["date"], "git": made["git"][:7]}
    about |= {"gpu": results["machine"]["gpus"][0], "torch": versions["torch"], "vllm": versions["vllm"]}
    about |= {"command": made["command"].replace("/tmp/", "")}
    servers = results["servers"]
    return [
        {"round": found["round"], "arm": found["arm"]}
        | {name: round(found[name], 3) for name in MEASURED}
        | {"kv_blocks": servers["stock" if found["arm"] == "stock" else "lorazor"]["kv_blocks"]}
        | about
        for found in results["rounds"]
    ]


def main() -> None:
    """Print the rows; with a header, unless they are to follow others."""
    rows = [row for name in sys.argv[1:] for row in rows_of(json.loads(Path(name).read_text(encoding="utf-8")))]
    table = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
    if sys.stdout.isatty() or sys.stdout.tell() == 0:
        table.writeheader()
    table.writerows(rows)


if __name__ == "__main__":
    main()
