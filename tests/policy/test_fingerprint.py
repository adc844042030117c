"""A fingerprint follows weights and configuration and nothing else."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lorazor.features.errors import InputError
from lorazor.policy.fingerprint import fingerprint

CONFIG = {"model_type": "llama", "hidden_size": 8, "torch_dtype": "bfloat16", "rope": {"theta": 1e4, "dtype": "x"}}
ADAPTER = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": "here/base"}


def _weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "layer.weight": torch.randn(4, 8, generator=generator).bfloat16(),
        "layer.bias": torch.randn(4, generator=generator),
        "scale": torch.tensor(2.0),
        "none": torch.empty(0, 3),
    }


def _base(folder: Path, weights: dict[str, torch.Tensor] | None = None, **config: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    save_file(weights or _weights(), folder / "model.safetensors")
    return folder


def _sharded(folder: Path, weights: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    where = {}
    for number, (name, tensor) in enumerate(sorted(weights.items(), reverse=True)):
        where[name] = f"model-{number}.safetensors"
        save_file({name: tensor}, folder / where[name])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def _adapter(folder: Path, **config: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({**ADAPTER, **config}))
    save_file({"lora_A": torch.ones(2, 4)}, folder / "adapter_model.safetensors")
    return folder


def test_same_model_elsewhere_is_the_same(tmp_path: Path) -> None:
    """Another folder, other shards, another loading dtype or library version: the same fingerprint."""
    one = fingerprint(_base(tmp_path / "a"))
    assert len(one) == 64
    assert one == fingerprint(_base(tmp_path / "b", torch_dtype="float32", transformers_version="9", _name_or_path="b"))
    assert one == fingerprint(_sharded(tmp_path / "c", _weights()))
    (tmp_path / "a" / "optimizer.safetensors").write_bytes(b"not the model's")
    assert one == fingerprint(str(tmp_path / "a"))


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w | {"layer.bias": w["layer.bias"].nextafter(torch.tensor(9.0))},
        lambda w: w | {"layer.weight": w["layer.weight"].view(torch.float16)},
        lambda w: w | {"layer.weight": w["layer.weight"].reshape(8, 4)},
        lambda w: {f"x.{name}": tensor for name, tensor in w.items()},
        lambda w: {name: tensor for name, tensor in w.items() if name != "none"},
    ],
    ids=["one bit", "dtype", "shape", "names", "a tensor less"],
)
def test_other_weights_are_another_model(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> None:
    """Any change of a tensor's value, dtype, shape, name or presence gives another fingerprint."""
    assert fingerprint(_base(tmp_path / "a")) != fingerprint(_base(tmp_path / "b", change(_weights())))


def test_configuration_counts(tmp_path: Path) -> None:
    """The same weights under another configuration are another model."""
    assert fingerprint(_base(tmp_path / "a")) != fingerprint(_base(tmp_path / "b", rope={"theta": 2e4}))


def test_adapter_is_known_by_what_it_does(tmp_path: Path) -> None:
    """For an adapter the base's path and the order of target modules don't count; lora_alpha does."""
    one = fingerprint(_adapter(tmp_path / "a"))
    other = {"base_model_name_or_path": "there", "target_modules": ["v_proj", "q_proj"], "inference_mode": True}
    assert one == fingerprint(_adapter(tmp_path / "b", **other))
    assert one != fingerprint(_adapter(tmp_path / "c", lora_alpha=32))


def _no_folder(root: Path) -> Path:
    return root / "nowhere"


def _no_weights(root: Path) -> Path:
    (_adapter(root / "m") / "adapter_model.safetensors").unlink()
    return root / "m"


def _no_config(root: Path) -> Path:
    (_base(root / "m") / "config.json").unlink()
    return root / "m"


def _bad_config(root: Path) -> Path:
    (_base(root / "m") / "config.json").write_text("{")
    return root / "m"


def _list_config(root: Path) -> Path:
    (_base(root / "m") / "config.json").write_text("[]")
    return root / "m"


def _cut_weights(root: Path) -> Path:
    path = _base(root / "m") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    return root / "m"


def _no_tensor(root: Path) -> Path:
    save_file({}, _base(root / "m") / "model.safetensors")
    return root / "m"


def _missing_shard(root: Path) -> Path:
    (_sharded(root / "m", _weights()) / "model-1.safetensors").unlink()
    return root / "m"


def _bad_index(root: Path) -> Path:
    (_sharded(root / "m", _weights()) / "model.safetensors.index.json").write_text('{"weight_map": [1]}')
    return root / "m"


def _twice(root: Path) -> Path:
    save_file(_weights(), _sharded(root / "m", _weights()) / "model-0.safetensors")
    return root / "m"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_no_folder, "nowhere: no such model or adapter folder"),
        (_no_weights, "adapter_model.safetensors: no such file; the weights must be in safetensors"),
        (_no_config, "holds neither adapter_config.json nor config.json"),
        (_bad_config, "config.json: not readable as JSON"),
        (_list_config, "config.json: must be a JSON object"),
        (_cut_weights, "model.safetensors: not readable as safetensors"),
        (_no_tensor, "model.safetensors: holds no tensor"),
        (_missing_shard, "model-1.safetensors: no such file"),
        (_bad_index, "weight_map must name the file of each tensor"),
        (_twice, "is also in"),
    ],
)
def test_folder_that_is_no_model(tmp_path: Path, make: Callable[[Path], Path], reason: str) -> None:
    """A folder without weights or configuration, or with damaged ones, is told in one sentence."""
    with pytest.raises(InputError) as error:
        fingerprint(make(tmp_path))
    assert reason in str(error.value)
