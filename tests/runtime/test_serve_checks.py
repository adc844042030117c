"""The checks of `lorazor serve` before an engine starts, on real folders, ports and artifacts."""

from __future__ import annotations

import socket
from argparse import Namespace
from pathlib import Path

import pytest

from lorazor.features.errors import InputError
from lorazor.policy.artifact import Artifact, load_artifact
from lorazor.runtime.serve_checks import check_adapters, check_model, check_pins, check_port, needed_rank
from tests.runtime.policies import make_policy, safe_from_step
from tests.runtime.serving import write_adapter_folder
from tests.runtime.tiny import Tiny


def test_check_model(tmp_path: Path, tiny: Tiny) -> None:
    """A model folder and a hub id pass; a path that is not there, or is no model, does not."""
    check_model(tiny.base)
    check_model("owner/name")
    for wrong, words in ((str(tmp_path / "none"), "does not exist"), ("./none", "does not exist")):
        with pytest.raises(InputError, match=words):
            check_model(wrong)
    with pytest.raises(InputError, match=r"config\.json"):
        check_model(str(tmp_path))


def test_check_port_free_and_in_use() -> None:
    """A port that another program listens on is refused and named; afterwards it is free again."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        args = Namespace(host="127.0.0.1", port=other.getsockname()[1], uds=None, headless=False)
        with pytest.raises(InputError, match=f"{args.port} is in use"):
            check_port(args)
        check_port(Namespace(**{**vars(args), "uds": "/tmp/socket"}))
    check_port(args)


def test_check_port_that_cannot_be() -> None:
    """A host that is not of this machine is told with the system's reason."""
    with pytest.raises(InputError, match=r"cannot listen on 192\.0\.2\.1:8000"):
        check_port(Namespace(host="192.0.2.1", port=8000, uds=None, headless=False))


def test_check_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pin with a typo would leave the safety adapter unpinned: it is refused, unless adapters may come later."""
    monkeypatch.delenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", raising=False)
    check_pins(["safety"], {"safety": "x"})
    with pytest.raises(InputError, match=r"--pin safty: .*there are safety, sql"):
        check_pins(["safty"], {"sql": "y", "safety": "x"})
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    check_pins(["safty"], {"safety": "x"})


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (None, "does not exist"),
        ({"weights": True}, r"no adapter_config\.json"),
        ({"config": {"r": 8}, "weights": False}, r"no weights \(adapter_model\.safetensors\)"),
    ],
)
def test_adapter_folders(tmp_path: Path, made: dict[str, object] | None, words: str) -> None:
    """An adapter folder that is missing, or lacks its configuration or weights, is named with what it lacks."""
    folder = tmp_path / "x"
    if made is not None:
        write_adapter_folder(folder, **made)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=f"--lora-modules x=.*{words}"):
        list(check_adapters(None, "m", {"x": str(folder)}))


@pytest.fixture
def artifact(tmp_path: Path, tiny: Tiny) -> Artifact:
    """A policy of the tiny base that knows its adapters a and b."""
    return load_artifact(make_policy(tmp_path / "p", tiny, safe_from_step(8), threshold=0.25))


def test_lines_about_adapters(artifact: Artifact, tiny: Tiny) -> None:
    """Each adapter's line says its task and threshold, found by weights and not by name."""
    modules = {"renamed": tiny.adapters["a"], "safety": tiny.adapters["b"], "c": tiny.adapters["c"]}
    assert list(check_adapters(artifact, tiny.base, modules, pinned=["safety"])) == [
        "adapter renamed: task open, threshold 0.25",
        "adapter safety: pinned, never released",
        "adapter c: not known to the policy, never released",
    ]
    assert "no policy" in next(iter(check_adapters(None, tiny.base, modules)))


def test_task_without_threshold_says_never(tmp_path: Path, tiny: Tiny) -> None:
    """A task that was tuned to never is said to be so."""
    artifact = load_artifact(make_policy(tmp_path / "p", tiny, safe_from_step(8), threshold=None))
    (line,) = check_adapters(artifact, tiny.base, {"a": tiny.adapters["a"]})
    assert line == "adapter a: task open, threshold never"


def test_a_policy_without_probes_is_said_to_be_one(tmp_path: Path, tiny: Tiny) -> None:
    """One line more, before those of the adapters."""
    artifact = load_artifact(make_policy(tmp_path / "p", tiny, safe_from_step(8), probes=False))
    probes, adapter = check_adapters(artifact, tiny.base, {"a": tiny.adapters["a"]})
    assert probes == "the policy has no probes: to decide, no row of the base is run"
    assert adapter == "adapter a: task open, threshold 0.9"


def test_policy_of_another_base(artifact: Artifact, tiny: Tiny) -> None:
    """A policy made for another base is refused with the field and both values."""
    other = artifact.manifest.model_copy(update={"base_fingerprint": "0" * 64})
    with pytest.raises(InputError, match=f"base_fingerprint is {'0' * 64} .*{artifact.manifest.base_fingerprint}"):
        list(check_adapters(Artifact(other, artifact.scorer, artifact.path), tiny.base, {}))


def test_needed_rank(tmp_path: Path, tiny: Tiny) -> None:
    """The largest rank of the adapters decides, a rank_pattern included; an unknown folder says nothing."""
    pattern = write_adapter_folder(tmp_path / "x", config={"r": 4, "rank_pattern": {"q_proj": 48}})
    assert needed_rank([tiny.adapters["a"], tiny.adapters["b"]]) == 16
    assert needed_rank([tiny.adapters["a"], pattern, "owner/name"]) == 48
    assert needed_rank([]) == 0


@pytest.mark.parametrize("content", ["{", "[]"])
def test_damaged_adapter_config(tmp_path: Path, content: str) -> None:
    """A damaged adapter_config.json is named."""
    folder = write_adapter_folder(tmp_path / "x", config=content)
    with pytest.raises(InputError, match=r"adapter_config\.json"):
        needed_rank([folder])
