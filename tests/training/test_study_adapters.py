"""Adapters, diagnosis and collection of a study in miniature: a tiny random Llama and two made-up tasks."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from lorazor.policy.fingerprint import fingerprint
from lorazor.training.boundary_mask import BoundaryMask
from lorazor.training.finetune_data import Example, collate
from lorazor.training.finetune_model import load_tokenizer
from lorazor.training.finetune_own import OwnOutputs
from lorazor.training.study.cli import main
from lorazor.training.study.collecting import Collecting, collect
from lorazor.training.study.diagnose import compared, load_adapter, token_class
from lorazor.training.study.layout import KINDS, Cell, Layout
from tests.runtime.tiny import Reference, make_tiny
from tests.training.fake_engine import FakeEngine
from tests.training.study_folder import task_data

pytestmark = pytest.mark.usefixtures("one_thread")
SHORT = {"rank": 4, "lr": 0.01, "batch": 8, "steps": 6, "eval_every": 3}
SMALL = ["--policy-train", "24", "--calibrate", "40", "--calibrate-least", "20", "--test", "24", "--validation", "8"]
UPPER = Cell("base", "upper", "ordinary")


class ChatEngine(FakeEngine):
    """The stand-in for vLLM, which takes rows of `messages`."""

    max_model_len = 200

    def encode(self, row: dict[str, Any]) -> tuple[int, ...]:
        """A prompt's tokens are its characters."""
        return tuple(ord(c) for c in row["messages"][0]["content"])


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """data/, base/, and in out/ the split, three adapters of one task and their diagnosis."""
    folder, threads = tmp_path_factory.mktemp("study"), torch.get_num_threads()
    torch.set_num_threads(1)
    make_tiny(folder, {})
    out, base = ["--out", str(folder / "out")], ["--base", str(folder / "base")]
    assert main(["split", "--data", str(task_data(folder / "data")), *out, *SMALL]) == 0
    assert main(["adapters", *base, *out, "--task", "upper", "--options", json.dumps(SHORT)]) == 0
    diagnosis = ["--task", "upper", "--requests", "10", "--batch", "4", "--most-tokens", "12"]
    assert main(["diagnose", *base, *out, *diagnosis]) == 0
    torch.set_num_threads(threads)
    return folder


def test_adapters_of_all_kinds(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their recipes differ in the cut alone, curves are kept, and a second run trains nothing."""
    records = {}
    for kind in KINDS:
        path = Layout(study / "out").adapter(Cell("base", "upper", kind)) / "finetune.json"
        records[kind] = json.loads(path.read_text())["recipe"]
    assert [records[kind].pop("cut") for kind in KINDS] == ["never", "prompt", "release-aware"]
    assert records["ordinary"] == records["prompt-only"] == records["release-aware"]
    curves = pd.read_csv(study / "out" / "curves.csv")
    kept = curves[(curves["adapter"] == "release-aware") & (curves["metric"] == "eval_prompt_loss")]
    assert list(kept["step"]) == [3, 6]
    assert kept["best"].sum() == 1
    capsys.readouterr()
    again = ["adapters", "--base", str(study / "base"), "--out", str(study / "out"), "--task", "upper"]
    assert main(again) == 0
    assert capsys.readouterr().err == ""


def test_one_kind_goes_on_from_another(study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the weights of the same task's adapter, which has to be there."""
    out = tmp_path / "out"
    (out / "adapters" / "base" / "upper").mkdir(parents=True)
    (out / "split").symlink_to(study / "out" / "split")
    command = ["adapters", "--base", str(study / "base"), "--out", str(out), "--task", "upper", "--init-from"]
    only, short = ["ordinary", "--adapter", "release-aware"], ["--options", json.dumps({**SHORT, "rank": None})]
    assert main([*command, *only, *short]) == 2
    assert "is not there yet" in capsys.readouterr().err
    assert main([*command, *only, "--adapter", "ordinary", *short]) == 0
    began, made = (Layout(out).adapter(Cell("base", "upper", kind)) for kind in ("ordinary", "release-aware"))
    records = [json.loads((folder / "finetune.json").read_text()) for folder in (began, made)]
    assert "init" not in records[0]
    assert records[1]["init"] == fingerprint(began)
    assert [record["recipe"]["cut"] for record in records] == ["never", "release-aware"]
    assert main([*command, "elsewhere", *short]) == 2
    assert "elsewhere" in capsys.readouterr().err


def test_bad_options_are_told(study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON, names and values."""
    command = ["adapters", "--base", str(study / "base"), "--out", str(study / "out"), "--task", "double", "--options"]
    for options, words in (("{", "--options is not JSON"), ('{"lrr": 1}', "did you mean"), ("[]", "a JSON object")):
        assert main([*command, options]) == 2
        assert words in capsys.readouterr().err


def test_the_diagnosis_has_a_row_for_each_request(study: Path) -> None:
    """Places and classes; a flip is within the output."""
    rows = pd.read_csv(study / "out" / "diagnosis.csv")
    assert len(rows) == 30
    assert (rows["release"] == 1).all()
    flipped = rows[rows["flips"] > 0]
    assert (flipped["first_flip"] < flipped["tokens"]).all()
    assert flipped["token_class"].notna().all()


def test_no_flip_means_the_same_text_when_released(tmp_path: Path) -> None:
    """The first flip is where a plain loop, with the adapter off from the boundary on, writes its first other token."""
    tiny = make_tiny(tmp_path, {"a": 8})
    base, tokenizer = Path(tiny.base), load_tokenizer(Path(tiny.base))
    model = load_adapter(base, Path(tiny.adapters["a"]))
    prompts = [tuple(range(40 + n, 52 + n)) for n in range(6)]
    examples = [Example(i, prompt, (1,)) for i, prompt in enumerate(prompts)]
    mask, reference = BoundaryMask(model), Reference(tiny)
    batch = {key: value.to(model.device) for key, value in collate(examples, 2).items()}
    said = OwnOutputs(2, 1, 6, refresh=1).replace(model, batch, 0)
    for release in (1, 5):
        rows = list(compared(model, mask, said, release, tokenizer))
        for prompt, row in zip(prompts, rows, strict=True):
            never = reference.text(prompt, "a", None, 6)
            released = reference.text(prompt, "a", release, 6)
            same = next((k for k in range(6) if never[k] != released[k]), None)
            assert row["first_flip"] == same
        means = pd.DataFrame(rows).filter(like="logprob_").mean()
        assert means["logprob_adapter"] > means[["logprob_released", "logprob_base"]].max()
    assert token_class(tokenizer, 1) == "end"
    assert [token_class(tokenizer, ord(c)) for c in "a7,"] == ["word rest", "digits", "punctuation"]
    assert token_class(tokenizer, 32) == "space"


def test_collect_goes_on_and_asks_for_an_engine_once(study: Path) -> None:
    """Every part of every adapter, one engine with the adapters of all, and nothing to do the second time."""
    layout, started = Layout(study / "out"), []

    def engine(config: Any) -> ChatEngine:
        started.append(sorted(config.adapters))
        return ChatEngine()

    def run() -> None:
        how = Collecting(probe_interval=4, shard_size=16)
        collect(study / "data", layout, study / "base", ["upper"], KINDS[:2], how, lambda _: None, engine)

    run()
    run()
    assert started == [["upper-ordinary", "upper-prompt-only"]]
    assert layout.collected() == [Cell("base", "upper", kind) for kind in KINDS[:2]]
    meta = json.loads((layout.collection(UPPER) / "rows" / "meta.json").read_text())
    assert meta["adapters"][0]["fingerprint"] == fingerprint(layout.adapter(UPPER))
    assert meta["tasks"]["upper"]["max_tokens"] == 32
    assert main(["policies", "--out", str(layout.out)]) == 0
    rows = pd.read_csv(layout.csv("policies"))
    assert set(rows["policy"]) == {"never", "base only", "prompt only"}
    assert (rows["n"] == 24).all()
    assert main(["report", "--out", str(layout.out)]) == 0
    assert "What flips first when released" in (layout.out / "report" / "study.md").read_text()


@pytest.mark.vllm
@pytest.mark.slow
def test_collect_with_vllm(study: Path, tmp_path: Path) -> None:
    """The same through the command, on a real engine: traces that the next stage takes."""
    out = tmp_path / "out"
    for name in ("split", "adapters"):
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).symlink_to(study / "out" / name)
    engine = {"dtype": "float32", "enforce_eager": True, "max_model_len": 128, "max_num_seqs": 16}
    engine |= {"kv_cache_memory_bytes": 64 << 20, "gpu_memory_utilization": 0.3}
    where = ["--data", str(study / "data"), "--base", str(study / "base"), "--out", str(out), "--task", "upper"]
    options = ["--adapter", "ordinary", "--limit", "10", "--most-tokens", "16", "--engine", json.dumps(engine)]
    assert main(["collect", *where, *options]) == 0
    assert main(["policies", "--out", str(out)]) == 0
    rows = pd.read_csv(out / "policies.csv")
    assert {"never", "base only", "prompt only"} <= set(rows["policy"])
    assert (rows[rows["scope"] == "all"]["n"] == 10).all()
