"""`lorazor bench`: stock vLLM and LoRazor take turns on the same requests; here is who runs when, and what they share.

What a server is and how it is driven is handed in (`Start`, `Server`), so everything here runs without vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from lorazor.features.errors import InputError
from lorazor.training.bench_release import ReleaseSteps
from lorazor.training.bench_workload import Body, Source, Workload, bodies, digest, draw, first_wave

Release = Literal["replay", "never"] | None
SERVERS = ("stock", "lorazor")


@dataclass(frozen=True)
class Arm:
    """One side of the comparison: which server, and what its requests say about releases."""

    name: str
    server: str
    release: Release


@dataclass(frozen=True)
class Plan:
    """A whole bench; `steps` None: the policy of the LoRazor server decides."""

    workload: Workload
    adapters: tuple[str, ...]
    source: Source
    steps: ReleaseSteps | None
    natural: bool = False
    rounds: int = 3
    seed: int = 0
    one_at_a_time: bool = False

    @property
    def arms(self) -> tuple[Arm, ...]:
        """Stock first: the others are compared with it."""
        released: Release = "replay" if self.steps else None
        return (Arm("stock", "stock", None), Arm("released", "lorazor", released), Arm("never", "lorazor", "never"))

    @property
    def lengths(self) -> tuple[str, ...]:
        """Fixed output length shows speed alone; with natural length, an answer that grows costs time too."""
        return ("fixed", "natural") if self.natural else ("fixed",)


class Server(Protocol):
    """A running server."""

    def run(
        self, sent: Sequence[Body], *, rate: float, burstiness: float, concurrency: int | None, seed: int
    ) -> dict[str, Any]:
        """Send the requests by vLLM's load generator; what it and the server's own counters say of them.

        The keys are those of vLLM's result (`completed`, `output_lens`, …), `release_steps` (null: not released) and
        whatever else is to be kept.
        """


Start = Callable[[str], AbstractContextManager[Server]]
"""Brings up the server of that name for the length of a block."""


def measure(plan: Plan, start: Start, say: Callable[[str], None]) -> Iterator[list[dict[str, Any]]]:
    """Run all rounds; after each of them what was recorded so far, a record for each round, arm and length.

    Raises:
        InputError: a server does not come up, goes away, or answers nothing.
    """
    records: list[dict[str, Any]] = []
    with ExitStack() as stack:
        if not plan.one_at_a_time:
            servers = {name: stack.enter_context(_warm(plan, name, start, say)) for name in SERVERS}
        for number in range(plan.rounds):
            if plan.one_at_a_time:
                records += _round_in_turn(plan, number, start, say)
            else:
                records += [_run(plan, servers[turn.arm.server], turn, say) for turn in turns(plan, number)]
            yield records


def _round_in_turn(plan: Plan, number: int, start: Start, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """One round with a server at a time, the other one first in every second round."""
    for name in SERVERS if number % 2 == 0 else SERVERS[::-1]:
        with _warm(plan, name, start, say) as server:
            for turn in turns(plan, number):
                if turn.arm.server == name:
                    yield _run(plan, server, turn, say)


@dataclass(frozen=True)
class Turn:
    """One run: its round, its arm, and "fixed" or "natural" output length."""

    number: int
    arm: Arm
    length: str


def turns(plan: Plan, number: int) -> list[Turn]:
    """Every run of a round, in order; another arm begins each round, so that none is always first."""
    first = number % len(plan.arms)
    arms = (*plan.arms[first:], *plan.arms[:first])
    return [Turn(number, arm, length) for length in plan.lengths for arm in arms]


@contextmanager
def _warm(plan: Plan, name: str, start: Start, say: Callable[[str], None]) -> Iterator[Server]:
    """A server that has answered one batch already, which is not measured."""
    say(f"starting the {name} server")
    with start(name) as server:
        say(f"warming up the {name} server")
        workload = first_wave(plan.workload)
        asks = draw(workload, plan.adapters, plan.source, plan.steps, f"{plan.seed} warm-up")
        release: Release = "replay" if plan.steps and name == "lorazor" else None
        sent = bodies(asks, f"warm-up-{name}", fixed=True, release=release)
        _answered(name, server.run(sent, **workload.load(), seed=plan.seed))
        yield server


def _run(plan: Plan, server: Server, turn: Turn, say: Callable[[str], None]) -> dict[str, Any]:
    say(f"round {turn.number + 1} of {plan.rounds}: {turn.arm.name}, {turn.length} length")
    asks = draw(plan.workload, plan.adapters, plan.source, plan.steps, f"{plan.seed} {turn.number}")
    run = f"{turn.arm.name}-{turn.length}-{turn.number}"
    sent = bodies(asks, run, fixed=turn.length == "fixed", release=turn.arm.release)
    # The arrival times are drawn from this seed: the same in every arm of a round.
    found = server.run(sent, **plan.workload.load(), seed=plan.seed + turn.number)
    _answered(turn.arm.server, found)
    about = {"round": turn.number, "arm": turn.arm.name, "length": turn.length, "requests_sha256": digest(sent)}
    return {**about, "adapters": [ask.adapter for ask in asks], **found}


def _answered(name: str, found: dict[str, Any]) -> None:
    if not found["completed"]:
        error = next((error for error in found["errors"] if error), "no reason given").strip().splitlines()[-1]
        raise InputError(f"the {name} server answered none of {len(found['errors'])} requests: {error}; see its log")
