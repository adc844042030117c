"""Which model is this? A hash of weights and configuration that no renaming, moving or re-sharding changes."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from lorazor.features.errors import InputError

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE_CONFIG, BASE_WEIGHTS, BASE_INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"

# Where a model lay, who wrote the file and how it is loaded: none of it changes what the weights compute.
_VOLATILE = {
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_name_or_path",
    "auto_mapping",
    "base_model_name_or_path",
    "dtype",
    "inference_mode",
    "peft_version",
    "revision",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
# Sets that PEFT writes as lists, in the order of the moment.
_UNORDERED = {"exclude_modules", "modules_to_save", "target_modules"}


def fingerprint(folder: str | Path) -> str:
    """64 hex digits: sha256 over the configuration and over each tensor's name, dtype, shape and bytes, by name.

    Args:
        folder: of a PEFT adapter (adapter_config.json) or of a base model (config.json), weights in safetensors.

    Raises:
        InputError: no folder, no configuration, no weights, or one of them damaged.
    """
    root = Path(folder)
    if not root.is_dir():
        raise InputError(f"{root}: no such model or adapter folder")
    digest = hashlib.sha256()
    digest.update(_canonical_config(root).encode())
    for name, path in sorted(_tensors(_weight_files(root)).items()):
        _add_tensor(digest, name, path)
    return digest.hexdigest()


def _canonical_config(root: Path) -> str:
    path = root / (ADAPTER_CONFIG if (root / ADAPTER_CONFIG).is_file() else BASE_CONFIG)
    if not path.is_file():
        raise InputError(f"{root}: holds neither {ADAPTER_CONFIG} nor {BASE_CONFIG}")
    return json.dumps(_without_volatile(_read_json(path)), sort_keys=True, separators=(",", ":"))


def _without_volatile(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {k: _without_volatile(v, k) for k, v in value.items() if k not in _VOLATILE}
    if key in _UNORDERED and isinstance(value, list):
        return sorted(value, key=str)
    return value


def _weight_files(root: Path) -> list[Path]:
    """The files that a loader would read, not every safetensors file that lies there."""
    if (root / ADAPTER_CONFIG).is_file():
        files = [root / ADAPTER_WEIGHTS]
    elif (root / BASE_INDEX).is_file():
        index = _read_json(root / BASE_INDEX).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise InputError(f"{root / BASE_INDEX}: weight_map must name the file of each tensor")
        files = [root / str(name) for name in sorted(set(index.values()))]
    else:
        files = [root / BASE_WEIGHTS]
    for path in files:
        if not path.is_file():
            raise InputError(f"{path}: no such file; the weights must be in safetensors")
    return files


def _tensors(files: list[Path]) -> dict[str, Path]:
    where: dict[str, Path] = {}
    for path in files:
        try:
            with safe_open(str(path), framework="pt") as weights:
                names = list(weights.keys())
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path}: not readable as safetensors ({error})") from None
        for name in names:
            if where.setdefault(name, path) != path:
                raise InputError(f"{path}: tensor {name} is also in {where[name].name}")
    if not where:
        raise InputError(f"{files[0]}: holds no tensor")
    return where


def _add_tensor(digest: "hashlib._Hash", name: str, path: Path) -> None:
    with safe_open(str(path), framework="pt") as weights:
        tensor = weights.get_tensor(name)
    digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
    digest.update(memoryview(tensor.reshape(-1).contiguous().view(torch.uint8).numpy()))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: must be a JSON object")
    return value
