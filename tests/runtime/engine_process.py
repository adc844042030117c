"""A program that runs one engine in a process of its own, because vLLM reads most of its environment once per process.

Standard input: {"tiny", "lorazor", "options", "batches": [[the fields of an Ask, …], …]}. Last line of standard output:
{"texts": token ids by batch and request, "facts": what ran}.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.runtime.tiny import Ask, Tiny, engine, run, tokens, worker

ROOT = Path(__file__).parents[2]
SECONDS = 400


def run_apart(
    tiny: Tiny,
    lorazor: dict[str, Any] | None,
    batches: Sequence[Sequence[Ask]],
    environment: dict[str, str],
    **options: Any,
) -> tuple[list[list[list[int]]], dict[str, Any]]:
    """The texts of each batch and what ran, from a fresh process with these variables."""
    job = {
        "tiny": asdict(tiny),
        "lorazor": lorazor,
        "options": options,
        "batches": [[asdict(ask) for ask in batch] for batch in batches],
    }
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    variables = {**os.environ, "PYTHONPATH": paths, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **environment}
    done = subprocess.run(
        [sys.executable, "-P", __file__],
        input=json.dumps(job),
        env=variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    return answer["texts"], answer["facts"]


def _facts(llm: Any) -> dict[str, Any]:
    runner, config = worker(llm).model_runner, llm.llm_engine.vllm_config
    manager = runner.lora_manager._adapter_manager
    wrappers = {id(m.punica_wrapper): m.punica_wrapper for m in manager.modules.values()}
    (status,) = llm.collective_rpc("lorazor_status")
    (traces,) = llm.collective_rpc("lorazor_traces", args=(None,))
    return {
        "runner": type(runner).__name__,
        "lora_state": type(getattr(runner, "lora_state", None)).__name__,
        "wrappers": [type(w).__name__ for w in wrappers.values()],
        "launches": sum(w.tokens.launches for w in wrappers.values()),
        "ranks": [w.tokens.ranks.tolist() for w in wrappers.values()],
        "graphs": str(config.compilation_config.cudagraph_mode),
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "counts": status["counts"],
        "traces": [
            {"tokens": list(map(int, t["token_ids"])), "probes": [list(map(float, row)) for row in t["probes"]]}
            for t in traces.values()
        ],
    }


def main() -> None:
    """Run the job on standard input."""
    job = json.loads(sys.stdin.read())
    tiny = Tiny(**job["tiny"])
    llm = engine(tiny, job["lorazor"], **job["options"])
    texts = []
    for batch in job["batches"]:
        asks = [Ask(**{**ask, "prompt": tuple(ask["prompt"])}) for ask in batch]
        texts.append([tokens(output) for output in run(llm, tiny, asks)])
    print(json.dumps({"texts": texts, "facts": _facts(llm)}))  # noqa: T201


if __name__ == "__main__":
    main()
