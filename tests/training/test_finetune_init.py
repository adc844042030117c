"""Training that goes on from an adapter: what it begins with, what it says of it, and what it refuses."""

import json
import os
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from lorazor.policy.fingerprint import fingerprint
from lorazor.runtime.cli import main
from lorazor.training.finetune_config import finetune_config
from lorazor.training.finetune_model import load_lora
from tests.runtime.tiny import make_tiny
from tests.training.finetune_rows import write_rows

pytestmark = pytest.mark.usefixtures("one_thread")
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base/, rows in upper.jsonl, and in adapter/ a LoRA of two kinds of layers that somebody else made."""
    folder = tmp_path_factory.mktemp("init")
    make_tiny(folder, {})
    write_rows(folder / "upper.jsonl", 24)
    save(folder / "adapter", folder / "base", r=6, lora_alpha=3, target_modules=["q_proj", "down_proj"])
    return folder


def save(out: Path, base: Path, **options: object) -> None:
    """A random adapter."""
    model = get_peft_model(LlamaForCausalLM.from_pretrained(base), LoraConfig(task_type="CAUSAL_LM", **options))
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.1)
    model.save_pretrained(out)


def run(folder: Path, out: Path, *options: str) -> int:
    """The command, for three steps that change next to nothing."""
    short = ["--lr", "1e-9", "--batch", "8", "--steps", "3", "--eval-every", "3", "--no-mlflow"]
    data = ["--data", str(folder / "upper.jsonl")]
    return main(["finetune", str(folder / "base"), str(out), *data, *short, *options])


def test_begins_with_the_adapter_and_keeps_its_shape(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank, alpha, layers and weights are the adapter's, which is named in the card and the record."""
    assert run(folder, tmp_path / "out", "--init", str(folder / "adapter")) == 0
    said = capsys.readouterr().out
    before, after = (load_file(path / WEIGHTS) for path in (folder / "adapter", tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.allclose(before[name], after[name], atol=1e-6) for name in before)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "base"), tmp_path / "out")
    assert (model.peft_config["default"].r, model.peft_config["default"].lora_alpha) == (6, 3)
    record = json.loads((tmp_path / "out" / "finetune.json").read_text())
    assert record["init"] == fingerprint(folder / "adapter")
    assert [record["recipe"][name] for name in ("rank", "alpha", "targets")] == [6, 3, ["down_proj", "q_proj"]]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "begun from the adapter adapter" in card
    # Next to nothing was learnt, so both validations agree, and both are told.
    assert record["begun"] == pytest.approx(record["metrics"], rel=1e-4)
    assert f"(before: {record['begun']['never_loss']:.4f}, " in said
    assert f"| never, the adapter begun from | {record['begun']['never_loss']:.4f} |" in card


def test_half_precision_is_trained_in_float32(folder: Path, tmp_path: Path) -> None:
    """Whatever the adapter's file holds, over whatever base."""
    save(tmp_path / "half", folder / "base", target_modules=["v_proj"])
    file = tmp_path / "half" / WEIGHTS
    save_file({name: weight.bfloat16() for name, weight in load_file(file).items()}, file)
    config = finetune_config(
        model=folder / "base",
        data=[folder / "upper.jsonl"],
        init=tmp_path / "half",
        bf16=True,
        gradient_checkpointing=True,
    )
    trained = [weight for weight in load_lora(config).parameters() if weight.requires_grad]
    assert trained
    assert {weight.dtype for weight in trained} == {torch.float32}


def test_a_resume_must_have_begun_with_the_same(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoints know the adapter by its weights."""
    with monkeypatch.context() as patch:
        patch.setattr("lorazor.training.finetune_save.fingerprint", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(folder, tmp_path / "out", "--init", str(folder / "adapter"))
    save(
        tmp_path / "other", folder / "base", r=6, lora_alpha=3, target_modules=["q_proj", "down_proj"], lora_dropout=0.1
    )
    assert run(folder, tmp_path / "out", "--init", str(tmp_path / "other"), "--resume") == 2
    assert "was started otherwise: init was" in capsys.readouterr().err
    assert run(folder, tmp_path / "out", "--init", str(folder / "adapter"), "--resume") == 0
    log = json.loads((tmp_path / "out" / "finetune.json").read_text())["log"]
    assert [row["step"] for row in log if "eval_loss" in row] == [0, 3]  # none of them twice


@pytest.fixture(scope="module")
def wrong(folder: Path) -> Path:
    """Adapters that training cannot go on from."""
    wide = folder / "wide"
    wide.mkdir()
    make_tiny(wide, {})
    config = json.loads((wide / "base" / "config.json").read_text())
    for name, key in (("of wider", "intermediate_size"), ("of deeper", "num_hidden_layers")):
        other = LlamaForCausalLM(LlamaForCausalLM.config_class(**{**config, key: 2 * config[key]}))
        other.save_pretrained(wide / "base")
        save(folder / name, wide / "base", target_modules=["down_proj"])
    save(folder / "dora", folder / "base", target_modules=["q_proj"], use_dora=True)
    save(folder / "more", folder / "base", target_modules=["q_proj"], modules_to_save=["lm_head"])
    (folder / "ia3").mkdir()
    (folder / "ia3" / "adapter_config.json").write_text('{"peft_type": "IA3", "target_modules": ["q_proj"]}')
    save(folder / "embedding", folder / "base", target_modules=["embed_tokens"])
    return folder


@pytest.mark.parametrize(
    ("init", "options", "words"),
    [
        ("adapter", ["--rank", "8"], ["--init brings the adapter's own rank: leave out --rank 8"]),
        ("adapter", ["--targets", "q_proj,v_proj"], ["leave out --targets q_proj,v_proj"]),
        ("nowhere", [], ["nowhere", "no LoRA adapter"]),
        ("ia3", [], ["ia3", "no LoRA adapter: its peft_type is IA3"]),
        ("of wider", [], ["of wider does not fit the base", "size mismatch"]),
        ("of deeper", [], ["of deeper does not fit the base", "layers.", "is in one of them alone"]),
        ("dora", [], ["dora is no plain LoRA", "magnitude"]),
        ("more", [], ["more is no plain LoRA", "lm_head"]),
        ("embedding", [], ["embedding is no plain LoRA", "lora_embedding"]),
    ],
)
def test_what_cannot_be_gone_on_from_is_told(
    wrong: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], init: str, options: list[str], words: list[str]
) -> None:
    """Exit code 2, one sentence, and nothing is left."""
    assert run(wrong, tmp_path / "out", "--init", str(wrong / init), *options) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lorazor: ")]
    assert all(word in line for word in words), line
    assert os.listdir(tmp_path) == []
