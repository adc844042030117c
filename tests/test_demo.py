"""The demo: its committed traces are what the README says, and the whole of it runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lorazor.training.train import train
from lorazor.training.tune import tune

ROOT = Path(__file__).resolve().parent.parent
TRACES = ROOT / "examples" / "traces"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The demo's policy and the report of its training, as numbers."""
    folder = tmp_path_factory.mktemp("demo")
    report = train(TRACES / "train", folder / "policy", mlflow_uri=None, json_path=folder / "train.json")
    assert report.artifact
    return folder / "policy", json.loads((folder / "train.json").read_text())


def test_tuning_certifies_both_tasks(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """At max-drop 5 % with 90 % confidence each task gets a threshold, and most of the rows are saved."""
    tune(trained[0], TRACES / "calibrate", max_drop=0.05, confidence=0.9, json_path=tmp_path / "tune.json")
    tasks = json.loads((tmp_path / "tune.json").read_text())["tasks"]
    assert all(task["threshold"] is not None and task["bound"] <= 0.05 for task in tasks.values())
    assert all(task["q_adapter"] - task["q_base"] >= 0.2 for task in tasks.values())
    assert tasks["booking"]["active_row_share"] <= 0.1
    assert tasks["dispatch"]["active_row_share"] <= 0.6


def test_no_fixed_step_comes_near_the_policy_on_dispatch(trained: tuple[Path, dict[str, Any]]) -> None:
    """At the same allowed drop the learned policy saves far more rows than the best fixed release step."""
    points = trained[1]["tasks"]["dispatch"]["policies"]
    for limit in (0.01, 0.03):
        saved = {p["policy"]: 1 - p["judged"]["active_row_share"] for p in points if p["limit"] == limit}
        assert saved["fixed step"] < 0.95 * saved["LightGBM"]


@pytest.mark.vllm
@pytest.mark.slow
def test_the_demo_runs() -> None:
    """As `make demo` does it: model, training, tuning, a real server, a dozen streamed requests, the report."""
    done = subprocess.run(
        [sys.executable, "examples/demo.py"], cwd=ROOT, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "demo/report.html shows all of it" in done.stdout
    report = (ROOT / "demo" / "report.html").read_text()
    assert "<svg" in report
    assert not re.search(r"""(src|href)=["']https?:""", report)  # one page, nothing fetched
