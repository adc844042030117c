"""What `lorazor serve` looks at before it starts an engine: model, port, adapters, pins, and whether the policy fits.

Each finds in a second what would otherwise show after a minute, or not at all (a policy for another base, a pin with a
typo), and says it in one sentence.
"""

import errno
import json
import os
import socket
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lorazor.features.errors import InputError

if TYPE_CHECKING:
    from lorazor.policy.artifact import Artifact

WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")


def _is_hub_id(name: str) -> bool:
    """Whether a name that is no path here could be `owner/name` on a model hub."""
    return not name.startswith(("/", ".", "~")) and name.count("/") == 1 and not Path(name).parent.is_dir()


def check_model(model: str) -> None:
    """InputError if `model` is written like a path, and there is no such folder with a config.json."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise InputError(f"the model folder {model} holds no config.json")
    elif model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise InputError(f"the model folder {model} does not exist")


def check_port(args: Namespace) -> None:
    """InputError if vLLM could not listen on `args.host:args.port`."""
    if args.uds or args.headless:
        return
    host = args.host or ""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As vLLM does it: a port that only lingers after a restart is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, args.port))
        except OSError as error:
            where = f"{host}:{args.port}" if host else f"port {args.port}"
            if error.errno == errno.EADDRINUSE:
                raise InputError(f"{where} is in use by another program: choose another with --port") from None
            raise InputError(f"cannot listen on {where}: {error.strerror or error}") from None


def check_pins(pinned: Iterable[str], modules: Mapping[str, str]) -> None:
    """InputError for a pinned name that no `--lora-modules` entry has, unless adapters may also be loaded later."""
    if os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "0") not in ("0", "", "False", "false"):
        return
    for name in pinned:
        if name not in modules:
            raise InputError(f"--pin {name}: no adapter is served under that name; there are {_names(modules)}")


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none (see --lora-modules)"


def check_adapters(
    artifact: "Artifact | None", model: str, modules: Mapping[str, str], pinned: Iterable[str] = ()
) -> Iterator[str]:
    """Yield a line for each adapter: its task and threshold, or that the policy does not know it; and one about probes.

    Raises:
        InputError: an adapter folder that is missing or holds no weights, or a policy made for another base.
    """
    for name, path in modules.items():
        _check_adapter_folder(name, path)
    if artifact is None:
        yield "no policy: requests release their adapter only where they ask for it (lorazor_release)"
        return
    _check_base(artifact, model)
    if not artifact.manifest.probes:
        yield "the policy has no probes: to decide, no row of the base is run"
    for name, path in modules.items():
        known = _what_the_policy_knows(artifact, Path(path).expanduser())
        yield f"adapter {name}: {'pinned, never released' if name in pinned else known}"


def _check_adapter_folder(name: str, path: str) -> None:
    folder = Path(path).expanduser()
    if not folder.is_dir():
        if _is_hub_id(path):
            return
        raise InputError(f"--lora-modules {name}={path}: the folder does not exist")
    if not (folder / "adapter_config.json").is_file():
        raise InputError(f"--lora-modules {name}={path}: the folder holds no adapter_config.json")
    if not any((folder / weights).is_file() for weights in WEIGHTS):
        raise InputError(f"--lora-modules {name}={path}: the folder holds no weights ({WEIGHTS[0]})")


def _check_base(artifact: "Artifact", model: str) -> None:
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return
    from lorazor.policy.fingerprint import fingerprint

    found, wanted = fingerprint(folder), artifact.manifest.base_fingerprint
    if found != wanted:
        raise InputError(
            f"the policy {artifact.path} was made for another base: base_fingerprint is {wanted} in policy.json, "
            f"{found} in {model}"
        )


def _what_the_policy_knows(artifact: "Artifact", folder: Path) -> str:
    if not folder.is_dir():
        return "checked when it has been downloaded"
    from lorazor.policy.fingerprint import fingerprint

    entry = artifact.task_of(fingerprint(folder))
    if entry is None:
        return "not known to the policy, never released"
    task = artifact.manifest.tasks.get(entry.task or "")
    if task is None or task.threshold is None:
        return f"task {entry.task or 'none'}, threshold never"
    return f"task {entry.task}, threshold {task.threshold:.4g}"


def needed_rank(paths: Iterable[str]) -> int:
    """The largest LoRA rank among the local adapter folders; 0 if none says.

    Raises:
        InputError: an adapter_config.json that is no JSON object.
    """
    return max((_rank(Path(path).expanduser() / "adapter_config.json") for path in paths), default=0)


def largest_size(paths: Iterable[str]) -> int:
    """Bytes of the weights of the largest of the local adapter folders; 0 if there are none."""
    sizes = (sum(f.stat().st_size for f in Path(path).expanduser().glob("*.safetensors")) for path in paths)
    return max(sizes, default=0)


def _rank(file: Path) -> int:
    if not file.is_file():
        return 0
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise InputError(f"{file}: must hold a JSON object, got {type(config).__name__}")
    ranks = [config.get("r"), *dict(config.get("rank_pattern") or {}).values()]
    return max((rank for rank in ranks if isinstance(rank, int)), default=0)
