"""`lorazor finetune` as a user runs it: what it leaves, going on after a stop, and what it says of bad input."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow import MlflowClient
from safetensors.torch import load_file

from lorazor.policy.fingerprint import fingerprint
from lorazor.runtime.cli import main
from lorazor.training.finetune_progress import ProgressCallback
from lorazor.training.finetune_trainer import FinetuneTrainer
from tests.runtime.tiny import make_tiny
from tests.training.finetune_rows import write_rows

pytestmark = pytest.mark.usefixtures("one_thread")
SHORT = ["--rank", "4", "--lr", "0.01", "--batch", "8", "--steps", "12", "--eval-every", "4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama in base/ and its rows in upper.jsonl."""
    folder = tmp_path_factory.mktemp("finetune")
    make_tiny(folder, {})
    write_rows(folder / "upper.jsonl", 40)
    return folder


def run(folder: Path, out: Path, *options: str) -> int:
    """The command on the fixture, without MLflow unless asked."""
    tracking = [] if "--mlflow" in options else ["--no-mlflow"]
    data = ["--data", str(folder / "upper.jsonl")]
    return main(["finetune", str(folder / "base"), str(out), *data, *SHORT, *tracking, *options])


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """As Ctrl-C in that step."""

    def interrupt(self: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == step:
            raise KeyboardInterrupt

    monkeypatch.setattr(ProgressCallback, "on_step_end", interrupt)


def test_leaves_a_peft_folder_that_says_how_it_was_made(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Adapter, card, record and MLflow run; nothing else is left, and the loss fell on both paths."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    out, uri = tmp_path / "adapter", f"sqlite:///{tmp_path / 'mlflow.db'}"
    options = ["--steps", "60", "--eval-every", "20", "--base-name", "maker/base", "--mlflow", uri]
    assert run(folder, out, *options) == 0
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md", "finetune.json"} == set(os.listdir(out))
    assert {"adapter", "mlflow.db", "mlruns"} >= set(os.listdir(tmp_path))
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "base"), out)
    assert model.peft_config["default"].r == 4
    assert model.peft_config["default"].lora_alpha == 8
    assert model.peft_config["default"].base_model_name_or_path == "maker/base"

    record = json.loads((out / "finetune.json").read_text())
    assert record["adapter_fingerprint"] == fingerprint(out)
    assert record["base_fingerprint"] == fingerprint(folder / "base")
    assert record["recipe"]["cut"] == "release-aware"
    assert {"command", "date", "git", "versions", "data_digest"} <= record.keys()
    assert record["versions"].keys() >= {"peft", "torch", "transformers"}
    for name, share in (("loss", 0.7), ("eval_never_loss", 1.0), ("eval_prompt_loss", 1.0)):
        curve = [row[name] for row in record["log"] if name in row]
        assert curve[-1] < share * curve[0], name
    printed = capsys.readouterr()
    assert "released after the prompt" in printed.out
    assert "finetune: step 60/60" in printed.err
    assert "log-uniform target token (30%), or never (20%)" in (out / "README.md").read_text()

    client = MlflowClient(tracking_uri=uri)
    (experiment,) = [e for e in client.search_experiments() if e.name == "lorazor"]
    (logged,) = client.search_runs([experiment.experiment_id])
    assert logged.data.params["cut"] == "release-aware"
    assert logged.data.metrics["best_loss"] == pytest.approx(record["metrics"]["loss"])
    assert [m.step for m in client.get_metric_history(logged.info.run_id, "loss")] == list(range(5, 61, 5))
    assert {f.path for f in client.list_artifacts(logged.info.run_id)} == {"adapter", "report.txt"}


@pytest.mark.parametrize("options", [(), ("--group-by-length",)])
def test_a_stopped_run_goes_on_to_the_same_weights(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
) -> None:
    """Stopped between two checkpoints and resumed, every weight equals that of the run that was left alone."""
    assert run(folder, tmp_path / "whole", *options) == 0
    out = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        stop_at(patch, 10)
        assert run(folder, out, *options) == 130
    assert not out.exists()
    assert (tmp_path / "stopped.checkpoints" / "checkpoint-8").is_dir()
    capsys.readouterr()
    assert run(folder, out, *options) == 2
    assert "stopped.checkpoints holds a run that did not end: give --resume" in capsys.readouterr().err
    assert run(folder, out, *options, "--resume", "--lr", "0.02") == 2
    assert "was started otherwise: recipe.lr was 0.01, is 0.02" in capsys.readouterr().err
    (tmp_path / "stopped.checkpoints" / "checkpoint-9").mkdir()  # a kill while it was being written
    assert run(folder, out, *options, "--resume") == 0
    whole, resumed = (load_file(path / "adapter_model.safetensors") for path in (tmp_path / "whole", out))
    assert whole.keys() == resumed.keys()
    for name, weight in whole.items():
        assert torch.equal(weight, resumed[name]), name
        assert weight.abs().max() > 0, name
    assert sorted(os.listdir(tmp_path)) == ["stopped", "whole"]


def test_a_failure_at_the_end_loses_no_training(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the folder cannot be written nothing of it is there, and --resume writes it without training again."""
    with monkeypatch.context() as patch:
        patch.setattr("lorazor.training.finetune_save.fingerprint", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(folder, tmp_path / "out")
    assert os.listdir(tmp_path) == ["out.checkpoints"]
    stop_at(monkeypatch, 12)
    assert run(folder, tmp_path / "out", "--resume") == 0
    assert os.listdir(tmp_path) == ["out"]


def test_all_options_go_together(folder: Path, tmp_path: Path) -> None:
    """bfloat16, recomputation, accumulation, distillation and own outputs in one run; the adapter stays in float32."""
    options = ["--bf16", "--gradient-checkpointing", "--accumulate", "2", "--distill", "1", "--own-outputs", "0.5"]
    assert run(folder, tmp_path / "out", *options, "--refresh", "4", "--targets", "q_proj, v_proj") == 0
    weights = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert len(weights) == 3 * 2 * 2
    assert all(weight.dtype == torch.float32 and weight.isfinite().all() for weight in weights.values())
    card = (tmp_path / "out" / "README.md").read_text()
    assert "distillation 1, 50% of the steps on its own outputs" in card


@pytest.mark.slow
def test_two_processes_train_as_one(folder: Path, tmp_path: Path) -> None:
    """Under torchrun with half the batch each, the losses are those of one process, and one process writes."""
    assert run(folder, tmp_path / "one", "--steps", "4") == 0
    arguments = ["finetune", folder / "base", tmp_path / "two", "--data", folder / "upper.jsonl", *SHORT, "--no-mlflow"]
    torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = [*torchrun, "--no-python", Path(sys.executable).with_name("lorazor"), *arguments]
    done = subprocess.run(
        [*map(str, program), "--batch", "4", "--steps", "4"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Adapter in") == 1
    one, two = (json.loads((tmp_path / name / "finetune.json").read_text()) for name in ("one", "two"))
    for row, other in zip(one["log"], two["log"], strict=True):
        for name in ("loss", "eval_never_loss", "eval_prompt_loss", "eval_exact"):
            assert row.get(name, 0.0) == pytest.approx(other.get(name, 0.0), rel=1e-3), name


def test_stops_when_validation_gains_no_more(folder: Path, tmp_path: Path) -> None:
    """With nothing ever exact the first validation stays the best; two more without gain end the run."""
    options = ["--steps", "100", "--lr", "1e-9", "--select-on", "exact", "--patience", "2"]
    assert run(folder, tmp_path / "out", *options) == 0
    record = json.loads((tmp_path / "out" / "finetune.json").read_text())
    assert (record["steps"], record["best_step"]) == (12, 4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rank", "0"], ["rank", "greater than or equal to 1", "got 0"]),
        (["--lr", "-1"], ["lr", "greater than 0", "got -1.0"]),
        (["--targets", "q_proj,k_prog"], ['unknown target module "k_prog" (did you mean "k_proj"?)']),
        (["--prompt-share", "0.8", "--uniform-share", "0.4"], ["at most 1 together, got 1.2"]),
        (["--distill", "1", "--cut", "prompt"], ["distill needs the cut release-aware, got prompt"]),
        (["--select-on", "luck"], ["select_on", "'loss' or 'exact'", "luck"]),
        (["--cut", "sometimes"], ["sometimes"]),
        (["--data", "nowhere.jsonl"], ["nowhere.jsonl", "cannot be read"]),
        (["--validation", "nowhere.jsonl"], ["nowhere.jsonl", "cannot be read"]),
        (["--max-length", "8"], ["upper.jsonl, line 1", "at most 8 together"]),
    ],
)
def test_bad_input_is_one_sentence(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: list[str]
) -> None:
    """Exit code 2, one line that names the thing, the rule and the value, and nothing is left."""
    assert run(folder, tmp_path / "out", *options) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lorazor: ")]
    assert all(word in line for word in words), line
    assert os.listdir(tmp_path) == []


def test_a_training_that_diverges_ends_at_once(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the step whose loss is not a number."""
    assert run(folder, tmp_path / "out", "--lr", "1e30", "--steps", "30") == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lorazor: ")]
    assert "the loss is nan at step" in line
    assert "lower --lr" in line
    assert not (tmp_path / "out").exists()


def test_places_that_do_not_fit_are_told(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An output that exists is never replaced, and a model must be a model's folder."""
    (tmp_path / "out").mkdir()
    assert run(folder, tmp_path / "out") == 2
    assert "out exists already; give another place" in capsys.readouterr().err
    assert run(tmp_path, tmp_path / "new") == 2
    assert "base: not a model folder (it has no config.json)" in capsys.readouterr().err


def test_a_batch_that_does_not_fit_is_told(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not a traceback of CUDA's, but what to change."""

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(FinetuneTrainer, "compute_loss", full)
    assert run(folder, tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert "does not fit into the GPU's memory" in said
    assert "--accumulate" in said
    assert not (tmp_path / "out").exists()


def test_several_gpus_without_a_launcher_are_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Copies of a model in threads would not see the mask."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert run(folder, tmp_path / "out") == 2
    assert "2 GPUs are visible: start with torchrun" in capsys.readouterr().err
