"""The requests of `lorazor bench`: drawn once for each round from a seed, then sent to every arm alike.

Prompts, adapters and release steps come from random streams of their own, so that changing one leaves the others as
they were. What an arm is sent are bodies for `POST /v1/completions`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal

from lorazor.features.errors import InputError
from lorazor.training.bench_release import ReleaseSteps

Arrivals = Literal["closed", "staggered", "poisson", "burst"]
Choice = Literal["uniform", "zipf"]
Body = dict[str, Any]
SPECIAL_TOKENS = 10  # at either end of most vocabularies; a prompt of random tokens keeps clear of them


@dataclass(frozen=True)
class Workload:
    """What one round sends. `rate` and `burstiness` are for open arrivals, `concurrency` for the closed loops."""

    name: str
    prompt_tokens: int
    output_tokens: int
    choice: Choice = "uniform"
    arrivals: Arrivals = "closed"
    requests: int = 256
    concurrency: int = 128
    rate: float | None = None
    burstiness: float = 0.1
    zipf_exponent: float = 1.0

    @property
    def is_open(self) -> bool:
        """Whether requests arrive by the clock instead of one for each that ends."""
        return self.arrivals in ("poisson", "burst")

    def load(self) -> dict[str, Any]:
        """The same in the words of vLLM's load generator."""
        if not self.is_open:
            return {"rate": float("inf"), "burstiness": 1.0, "concurrency": self.concurrency}
        burstiness = self.burstiness if self.arrivals == "burst" else 1.0
        return {"rate": self.rate, "burstiness": burstiness, "concurrency": None}


WORKLOADS = {
    "short": Workload("short", 128, 64),
    "long": Workload("long", 128, 1024),
    "mixed": Workload("mixed", 128, 256, choice="zipf"),
    "burst": Workload("burst", 128, 128, choice="zipf", arrivals="burst"),
}


def workload_of(name: str, changes: Mapping[str, Any]) -> Workload:
    """A named workload with what the user changed; None in `changes` means "as it is".

    Raises:
        InputError: a value outside its rule, or open arrivals without a rate.
    """
    if name not in WORKLOADS:
        raise InputError(f"--workload must be one of {', '.join(WORKLOADS)}, got {name!r}")
    workload = replace(WORKLOADS[name], **{key: value for key, value in changes.items() if value is not None})
    for field in ("prompt_tokens", "output_tokens", "requests", "concurrency"):
        if getattr(workload, field) < 1:
            raise InputError(f"--{field.replace('_', '-')} must be at least 1, got {getattr(workload, field)}")
    for field in ("rate", "burstiness", "zipf_exponent"):
        value = getattr(workload, field)
        if value is not None and not 0 < value < float("inf"):
            raise InputError(f"--{field.replace('_', '-')} must be a number above 0, got {value:g}")
    if workload.is_open and workload.rate is None:
        raise InputError(f"{workload.arrivals} arrivals need --rate, in requests per second")
    if not workload.is_open and workload.rate is not None:
        raise InputError(f"--rate is for poisson and burst arrivals, not for {workload.arrivals}")
    return workload


@dataclass(frozen=True)
class Ask:
    """One request before an arm is chosen; `release_step` None: never, if release steps are replayed at all."""

    prompt: list[int] | str
    adapter: str
    output_tokens: int
    release_step: int | None


@dataclass(frozen=True)
class Source:
    """Where prompts come from: `rows` of a file ({"prompt", "adapter"?}), or random tokens of a `vocabulary`."""

    vocabulary: int = 0
    rows: tuple[Mapping[str, str], ...] = ()


def draw(
    workload: Workload, adapters: Sequence[str], source: Source, steps: ReleaseSteps | None, seed: str
) -> list[Ask]:
    """The requests of one round; the same arguments give the same requests."""
    prompts, choices, releases = (Random(f"{seed} {what}") for what in ("prompts", "adapters", "releases"))
    weights = choice_weights(workload, len(adapters))
    rows = _prompts(workload, source, prompts)
    asks = []
    for number in range(workload.requests):
        prompt, adapter = next(rows)
        chosen = choices.choices(adapters, weights)[0]
        tokens = _output_tokens(workload, number)
        step = steps.draw(releases, tokens) if steps else None
        asks.append(Ask(prompt, adapter or chosen, tokens, step))
    return asks


def choice_weights(workload: Workload, adapters: int) -> list[float]:
    """How often each adapter is asked for: all alike, or the k-th in proportion to 1 / k^exponent."""
    if workload.choice == "uniform":
        return [1.0] * adapters
    return [1 / k**workload.zipf_exponent for k in range(1, adapters + 1)]


def _prompts(workload: Workload, source: Source, random: Random) -> Any:
    while not source.rows:
        low, high = SPECIAL_TOKENS, max(SPECIAL_TOKENS + 1, source.vocabulary - SPECIAL_TOKENS)
        yield [random.randrange(low, high) for _ in range(workload.prompt_tokens)], None
    while True:
        for row in random.sample(source.rows, len(source.rows)):
            yield row["prompt"], row.get("adapter")


def _output_tokens(workload: Workload, number: int) -> int:
    # Staggered: the first wave ends one by one, so the rows of a batch are at different steps from then on.
    if workload.arrivals != "staggered" or number >= min(workload.concurrency, workload.requests):
        return workload.output_tokens
    return max(1, workload.output_tokens * (number + 1) // min(workload.concurrency, workload.requests))


def bodies(asks: Sequence[Ask], run: str, *, fixed: bool, release: Literal["replay", "never"] | None) -> list[Body]:
    """What is sent for `asks`.

    Args:
        asks: as `draw` gave them.
        run: a name of this run that no other run of this server has.
        fixed: every answer has exactly its `output_tokens`; else the model may end earlier.
        release: "replay" the steps that were drawn, "never" release, or None: say nothing (stock, or a policy).
    """
    made = []
    for number, ask in enumerate(asks):
        body: Body = {"model": ask.adapter, "prompt": ask.prompt, "max_tokens": ask.output_tokens, "temperature": 0}
        # The salt keeps runs from finding each other's prompts in the prefix cache, on either server.
        body |= {"ignore_eos": fixed, "cache_salt": run, "request_id": f"{run}-{number}"}
        if release is not None:
            step = ask.release_step if release == "replay" else None
            body["vllm_xargs"] = {"lorazor_release": "never" if step is None else step}
        made.append(body)
    return made


def digest(sent: Sequence[Body]) -> str:
    """A short hash of what every arm must have in common: prompts, adapters and lengths."""
    common = [[body[key] for key in ("model", "prompt", "max_tokens", "ignore_eos")] for body in sent]
    return hashlib.sha256(json.dumps(common).encode()).hexdigest()[:16]


def first_wave(workload: Workload) -> Workload:
    """A closed round of at most one full batch, to warm a server up."""
    return replace(workload, arrivals="closed", rate=None, requests=min(workload.requests, workload.concurrency))
