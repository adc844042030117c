"""collect on real vLLM with a tiny random Llama: rows against a plain transformers + PEFT loop, a kill and a resume."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from lorazor.features.errors import InputError
from lorazor.features.grid import release_grid
from lorazor.training.collect import collect
from lorazor.training.collect_vllm import VllmEngine
from lorazor.training.config import load_config
from lorazor.training.traces import TraceSet, read_traces
from tests.runtime.tiny import VOCAB, Reference, Tiny, make_tiny, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

G, TOKENS, REQUESTS, JUDGED = 4, 18, 10, 3
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
CHILD = "import sys; from lorazor.training.collect import collect; collect(sys.argv[1], sys.argv[2])"


def words(tokens: Any) -> str:
    """What the test's tokenizer makes of token ids."""
    return " ".join(f"t{token}" for token in tokens)


def add_tokenizer(folder: str) -> None:
    """A word-level tokenizer: token 7 is written t7."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({f"t{k}": k for k in range(VOCAB)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0")
    fast.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}t1"
    fast.save_pretrained(folder)


def make_config(folder: Path, tiny: Tiny, reference: Reference) -> Path:
    """Two tasks: "released" is judged by the plain loop's text for release step 3, "base" by the base's."""
    asks = [prompt(seed, 6 + seed % 5) for seed in range(REQUESTS)]
    wanted = {
        "released": [reference.text(ask, "a", JUDGED, TOKENS) for ask in asks],
        "base": [reference.text(ask, None, None, TOKENS) for ask in asks],
    }
    for task, texts in wanted.items():
        rows = [
            {"id": k, "prompt": words(ask), "reference": words(text)}
            for k, (ask, text) in enumerate(zip(asks, texts, strict=True))
        ]
        (folder / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chat = {"id": "chat", "messages": [{"role": "user", "content": "t5 t6"}], "reference": "t1"}
    (folder / "base.jsonl").open("a").write(json.dumps(chat))
    config = {
        "base": tiny.base,
        "adapters": tiny.adapters,
        "probe_interval": G,
        "shard_size": 4,
        "noise": {"requests": 4, "concurrency": 1},
        "engine": {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 64,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 32 << 20,
        },
        "tasks": {
            task: {"adapter": adapter, "data": f"{task}.jsonl", "scorer": "exact_match", "max_tokens": TOKENS}
            for task, adapter in (("released", "a"), ("base", "b"))
        },
    }
    path = folder / "collect.yaml"
    path.write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """The base with a tokenizer and two adapters."""
    made = make_tiny(Path(tmp_path_factory.mktemp("tiny")), {"a": 8, "b": 16})
    add_tokenizer(made.base)
    return made


@pytest.fixture(scope="module")
def reference(tiny: Tiny) -> Reference:
    """The plain loop."""
    return Reference(tiny)


@pytest.fixture(scope="module")
def config(tiny: Tiny, reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The YAML file."""
    return make_config(Path(tmp_path_factory.mktemp("collection")), tiny, reference)


@pytest.fixture(scope="module")
def engine(config: Path) -> VllmEngine:
    """One engine for the whole module."""
    with pytest.MonkeyPatch.context() as patch:
        for key, value in ENVIRONMENT.items():
            patch.setenv(key, value)
        return VllmEngine(load_config(config))


@pytest.fixture(scope="module")
def traces(config: Path, engine: VllmEngine) -> TraceSet:
    """An unbroken collection."""
    folder = config.parent / "unbroken"
    report = collect(config, folder, engine=lambda _: engine)
    assert report.tokens > 0
    return read_traces(folder)


def tokens_by_request(traces: TraceSet, task: str) -> dict[str, list[int]]:
    """The never-released tokens of a task's requests."""
    rows = traces.select(task).steps
    return {str(name): part["token_id"].tolist() for name, part in rows.groupby("request_id")}


def test_traces_are_the_plain_loops_tokens(traces: TraceSet, reference: Reference) -> None:
    """Every never-released token is the one of transformers + PEFT, for both adapters."""
    for task, adapter in (("released", "a"), ("base", "b")):
        found = tokens_by_request(traces, task)
        for seed in range(REQUESTS):
            ask = prompt(seed, 6 + seed % 5)
            assert found[f"{task}/{seed}"] == reference.text(ask, adapter, None, TOKENS)
    assert tokens_by_request(traces, "base")["base/chat"] == reference.text((5, 6, 1), "b", None, TOKENS)


def test_scores_are_those_of_the_right_outcome(traces: TraceSet) -> None:
    """The text released at step 3 is the plain loop's for 3, the base's is the base's, and the others are neither."""
    rows = traces.select("released").rollouts
    hits = rows[rows["score"] == 1]
    assert hits.groupby("request_id").size().min() >= 1
    assert (rows[rows["release_step"] == JUDGED]["score"] == 1).all()
    assert (rows[rows["mode"] == "adapter"]["score"] == 0).all()
    base = traces.select("base").rollouts
    named = base[base["request_id"] != "base/chat"]
    assert (named[named["mode"] == "base"]["score"] == 1).all()
    assert (named[named["mode"] == "adapter"]["score"] == 0).all()


def test_every_release_step_of_the_grid_is_there_and_holds_its_prefix(traces: TraceSet) -> None:
    """No rollout is missing or left out, and texts differ from the never-released one."""
    released = traces.rollouts[traces.rollouts["mode"] == "released"]
    for _, rows in released.groupby("request_id"):
        assert rows["release_step"].tolist() == release_grid(TOKENS, G)
    assert not released["differs"].any()
    assert (~released["same_text"]).mean() > 0.5
    assert (traces.rollouts["finish_reason"] == "length").all()


def test_signals_are_those_of_the_plain_loops_logits(traces: TraceSet, reference: Reference) -> None:
    """Entropy, log-probability and KL of a trace against float64 arithmetic on transformers' own logits."""
    ask = prompt(3, 6 + 3 % 5)
    rows = traces.steps[traces.steps["request_id"] == "released/3"].reset_index(drop=True)
    adapter = [logits.double().log_softmax(0) for _, logits in reference.decode(ask, "a", None, TOKENS)]
    base = [logits.double().log_softmax(0) for logits in reference.base_logits_beside(ask, "a", TOKENS)]
    entropy = [-float((p.exp() * p).sum()) for p in adapter]
    chosen = [float(p[token]) for p, token in zip(adapter, rows["token_id"], strict=True)]
    np.testing.assert_allclose(rows["entropy"], entropy, atol=2e-4)
    np.testing.assert_allclose(rows["token_logprob"], chosen, atol=2e-4)
    probed = rows.index[rows["probed"]]
    assert probed.tolist() == [1, *range(G, TOKENS, G)]
    kl = [float((adapter[c].exp() * (adapter[c] - base[c - 1])).sum()) for c in probed]
    np.testing.assert_allclose(rows["kl"][probed], kl, atol=2e-4)


def test_the_noise_floor_is_measured_one_request_at_a_time(traces: TraceSet) -> None:
    """In float32 the tiny model says the same at batch size 1."""
    for noise in traces.meta.noise.values():
        assert noise.n == 4
        assert noise.differing == 0


def test_killed_and_resumed_it_gives_the_same_rows(config: Path, engine: VllmEngine, traces: TraceSet) -> None:
    """SIGKILL after the second shard, then a resume: tokens equal, floats to 1e-4."""
    folder = config.parent / "killed"
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", CHILD, str(config), str(folder)], env={**os.environ, **ENVIRONMENT}
    )
    deadline = time.monotonic() + 300
    while not (folder / "rollouts" / "shard-00001.parquet").exists() and child.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert child.returncode == -signal.SIGKILL
    report = collect(config, folder, resume=True, engine=lambda _: engine)
    assert 2 <= report.resumed_shards < report.shards
    again = read_traces(folder)
    for kind in ("steps", "rollouts"):
        before, after = getattr(traces, kind), getattr(again, kind)
        floats = before.select_dtypes("float32").columns
        pd.testing.assert_frame_equal(before.drop(columns=floats), after.drop(columns=floats))
        np.testing.assert_allclose(before[floats], after[floats], atol=1e-4)


def test_forked_rollouts_are_those_of_whole_runs(config: Path, engine: VllmEngine, traces: TraceSet) -> None:
    """Given the trace's first r - 1 tokens, a released run ends in the same text, for fewer generated tokens."""
    settings = json.loads(config.read_text())
    path = config.parent / "forked.yaml"
    path.write_text(json.dumps({**settings, "rollouts": "forked", "noise": {"requests": 0}}))
    report = collect(path, config.parent / "forked", engine=lambda _: engine)
    again = read_traces(config.parent / "forked")
    pd.testing.assert_frame_equal(again.rollouts, traces.rollouts)
    assert again.steps["token_id"].equals(traces.steps["token_id"])
    assert report.tokens < traces.rollouts["output_tokens"].sum()


def test_sampled_requests_draw_the_same_prefix(config: Path, engine: VllmEngine, tmp_path: Path) -> None:
    """With a temperature every run of a request has the same seed, so released runs follow their trace."""
    settings = json.loads(config.read_text())
    task = {
        **settings["tasks"]["base"],
        "sampling": {"temperature": 0.8, "seed": 5},
        "data": str(config.parent / "base.jsonl"),
    }
    path = tmp_path / "sampled.yaml"
    path.write_text(json.dumps({**settings, "tasks": {"base": task}}))
    first = collect(path, tmp_path / "one", engine=lambda _: engine, limit=4)
    assert first.tasks["base"].left_out == 0
    traces = read_traces(tmp_path / "one")
    assert not traces.meta.greedy
    collect(path, tmp_path / "two", engine=lambda _: engine, limit=4)
    assert read_traces(tmp_path / "two").steps["token_id"].equals(traces.steps["token_id"])


def test_an_unknown_engine_option_is_told(config: Path, tmp_path: Path) -> None:
    """vLLM's own options are known by name before anything is loaded."""
    settings = json.loads(config.read_text())
    broken = {**settings, "engine": {"max_num_seq": 4}}
    broken["tasks"] = {k: {**t, "data": str(config.parent / t["data"])} for k, t in settings["tasks"].items()}
    path = tmp_path / "broken.yaml"
    path.write_text(json.dumps(broken))
    with pytest.raises(InputError, match=r'unknown engine option "max_num_seq" \(did you mean "max_num_seqs"\?\)'):
        collect(path, tmp_path / "out")
