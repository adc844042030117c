"""What `lorazor bench` does with its arguments: check them, bring workload, servers and load generator together, write.

All that can be checked is checked before a server starts; results and page are written after each round, each as a
whole, so that a bench that is stopped, or whose server dies, keeps the rounds that it has.
"""

import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jinja2  # noqa: F401  # here, so that a missing one is told before the measuring, not after it
import matplotlib  # noqa: F401

from lorazor.features.errors import InputError
from lorazor.runtime import bench_options, bench_watch
from lorazor.runtime.bench_server import Running, serving
from lorazor.runtime.serve_checks import check_adapters, needed_rank
from lorazor.training.bench import Plan, Server, measure
from lorazor.training.bench_inputs import read_adapters, read_prompts
from lorazor.training.bench_page import render
from lorazor.training.bench_release import DEFAULT, DEFAULT_NEVER, ReleaseSteps, parse_steps
from lorazor.training.bench_results import report_lines, results_of
from lorazor.training.bench_workload import Source, Workload, workload_of
from lorazor.training.provenance import atomic_write_text, made_by

RESULTS, PAGE, LOGS = "results.json", "report.html", "logs"


@dataclass(frozen=True)
class Asked:
    """The command line, as it was given; `changes` go into the named workload."""

    model: str
    adapters: tuple[str, ...]
    options: tuple[str, ...]
    stock_options: tuple[str, ...]
    policy: str | None
    release_steps: str | None
    never: float | None
    workload: str
    changes: Mapping[str, Any]
    prompts: Path | None
    natural: bool
    rounds: int
    seed: int
    one_at_a_time: bool
    out: Path


def run(asked: Asked, say: Callable[[str], None]) -> list[str]:
    """The whole bench; the lines to print at the end.

    Raises:
        InputError: bad input, before anything is written, or a server that fails; its log stays.
    """
    workload = workload_of(asked.workload, asked.changes)
    steps = _steps(asked)
    if asked.rounds < 1:
        raise InputError(f"--rounds must be at least 1, got {asked.rounds}")
    adapters = read_adapters(asked.adapters)
    rows = read_prompts(asked.prompts, adapters) if asked.prompts else ()
    if (asked.out / RESULTS).exists():
        raise InputError(f"{asked.out} holds the results of another bench: choose another folder with --out")
    _check_policy(asked, adapters)
    say("checking the options of the servers")
    bench_options.import_vllm()
    engine = bench_options.engine_of(asked.model, adapters, asked.options)
    _check_room(workload, engine.max_model_len, bool(rows))
    source = Source(rows=rows) if rows else Source(vocabulary=bench_options.vocabulary(asked.model))
    plan = Plan(workload, tuple(adapters), source, steps, asked.natural, asked.rounds, asked.seed, asked.one_at_a_time)
    fleet = _Fleet(asked, engine)
    results: dict[str, Any] = {}
    for records in measure(plan, fleet.start, say):
        results = results_of(records, _about(asked, plan, adapters, engine.dummy, fleet.known, records))
        page = render(results)
        atomic_write_text(asked.out / RESULTS, json.dumps(results, indent=1) + "\n")
        atomic_write_text(asked.out / PAGE, page)
    return [*report_lines(results), f"wrote {asked.out / RESULTS} and {asked.out / PAGE}"]


def _steps(asked: Asked) -> ReleaseSteps | None:
    if asked.policy is None:
        never = DEFAULT_NEVER if asked.never is None else asked.never
        return parse_steps(DEFAULT if asked.release_steps is None else asked.release_steps, never)
    if asked.release_steps is not None or asked.never is not None:
        raise InputError("--policy decides where to release: leave out --release-steps and --never")
    return None


def _check_policy(asked: Asked, adapters: Mapping[str, str]) -> None:
    from lorazor.policy.artifact import load_artifact

    artifact = load_artifact(asked.policy) if asked.policy else None
    list(check_adapters(artifact, asked.model, adapters))


def _check_room(workload: Workload, max_model_len: int | None, own_prompts: bool) -> None:
    needed = workload.output_tokens + (1 if own_prompts else workload.prompt_tokens)
    if max_model_len is not None and 0 < max_model_len < needed:
        raise InputError(f"--max-model-len {max_model_len} has no room for the {needed} tokens of a request")


@dataclass
class _Fleet:
    """Starts the servers of a bench and remembers what each was."""

    asked: Asked
    engine: bench_options.Engine
    known: dict[str, dict[str, Any]] = field(default_factory=dict)

    @contextmanager
    def start(self, name: str) -> Iterator[Server]:
        """One of the two, for the length of the block."""
        asked = self.asked
        command, environment = bench_options.launch(name, asked.model, self.engine, asked.policy, asked.stock_options)
        logs = asked.out / LOGS
        logs.mkdir(parents=True, exist_ok=True)
        with serving(name, command, environment, logs / f"{name}.log") as server:
            self.known[name] = self._about(server, command, environment)
            yield server

    def _about(self, server: Running, command: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
        return {
            "command": shlex.join(["python", *command[1:]]),
            "environment": {key: value for key, value in environment.items() if key.startswith("VLLM_")},
            "own_options": list(self.asked.stock_options) if server.name == "stock" else [],
            "kv_blocks": bench_watch.kv_blocks(server.url),
            "start_seconds": round(server.seconds, 1),
            "log": str(server.log),
        }


def _about(
    asked: Asked,
    plan: Plan,
    adapters: Mapping[str, str],
    dummy: bool,
    servers: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    asks = Counter(name for record in records if record["arm"] == "stock" for name in record["adapters"])
    release = {"kind": "replayed", "steps": str(plan.steps)} if plan.steps else {"kind": "policy"}
    return {
        "made_by": made_by(),
        "machine": bench_watch.machine(),
        "model": asked.model,
        "dummy_weights": dummy,
        "adapters": {
            name: {"path": path, "rank": needed_rank([path]), "requests": asks[name]} for name, path in adapters.items()
        },
        "workload": {**asdict(plan.workload), **_prompts(asked)},
        "release": {**release, "policy": asked.policy},
        "rounds_run": records[-1]["round"] + 1,
        "seed": plan.seed,
        "one_at_a_time": plan.one_at_a_time,
        "servers": dict(servers),
    }


def _prompts(asked: Asked) -> dict[str, Any]:
    # Prompts of a file are as long as they are.
    return {"prompts": str(asked.prompts), "prompt_tokens": None} if asked.prompts else {"prompts": "random tokens"}
