"""The command line: every command's help, one sentence for bad input, and the whole life of a policy through it."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from lorazor.features.errors import InputError
from lorazor.runtime.cli import app, main
from lorazor.runtime.cli_text import needs_extra, stages

COMMANDS = ("collect", "import-traces", "train", "tune", "evaluate", "inspect", "serve", "bench", "doctor", "demo")


def test_every_command_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """`lorazor` alone and `lorazor --help` list all commands."""
    assert main([]) == main(["--help"]) == 0
    first, _, second = capsys.readouterr().out.partition("Usage: lorazor [OPTIONS]")[2].partition("Usage:")
    for command in COMMANDS:
        assert f"\n  {command} " in first
        assert f"\n  {command} " in second


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command's help shows at least one line that can be typed."""
    assert main([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert "Example" in out
    assert f"  lorazor {command}" in out


def test_every_argument_has_help() -> None:
    """No flag is left unexplained."""
    import typer

    group: Any = typer.main.get_command(app)
    unexplained = [
        f"{name} {parameter.name}"
        for name, command in group.commands.items()
        for parameter in command.params
        if not getattr(parameter, "help", None)
    ]
    assert unexplained == []


def test_help_is_fast_to_import() -> None:
    """Help needs neither torch nor pandas nor vLLM."""
    program = "import sys\nfrom lorazor.runtime.cli import main\nmain(['tune', '--help'])\nprint(*sys.modules)"
    run = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    loaded = set(run.stdout.splitlines()[-1].split())
    assert loaded & {"torch", "pandas", "numpy", "lightgbm", "vllm", "mlflow", "rich"} == set()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["nope"], ["nope"]),
        (["tune"], ["POLICY"]),
        (["tune", "p", "t", "--max-drop", "much"], ["--max-drop"]),
        (["tune", "p", "t", "--max-dorp", "0.1"], ["--max-dorp"]),
        (["tune", "p", "t", "--loss", "all"], ["--loss", "all"]),
        (["tune", "/none/p", "/none/t", "--max-drop", "0"], ["--max-drop", "0"]),
        (["tune", "/none/p", "/none/t", "--max-drop", "0.1"], ["/none/"]),
        (["inspect", "/none/p"], ["/none/p"]),
        (["evaluate", "/none/p", "/none/t"], ["/none/"]),
        (["train", "/none/t", "/none/p"], ["/none/t"]),
        (["collect", "/none/c.yaml", "/none/t"], ["/none/c.yaml"]),
        (["import-traces", "/none/s", "/none/t"], ["/none/s"]),
        (["import-traces", "s", "t", "--adapter", "sql"], ["--adapter", "NAME=FOLDER", "'sql'"]),
        (["serve", "m", "--policy", "/none/p"], ["/none/p"]),
        (["serve", "m", "--release-fraction", "2"], ["--release-fraction", "2"]),
    ],
)
def test_bad_input_is_one_sentence(argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, and one line on stderr that begins with our name and names what is wrong."""
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("lorazor: ")
    assert captured.err.count("\n") == 1
    assert all(word in captured.err for word in words)
    assert captured.out == ""


def test_bugs_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception that is not about the input comes out as it is."""
    from lorazor.runtime import doctor

    def broken() -> list[doctor.Finding]:
        raise RuntimeError("a bug")

    monkeypatch.setattr(doctor, "examine", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["doctor"])


def test_doctor_gives_its_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`lorazor doctor` ends with 1 when something stops LoRazor from serving."""
    from lorazor.runtime import doctor

    monkeypatch.setattr(doctor, "examine", lambda: [doctor.Finding("problem", "no vLLM", "install it")])
    assert main(["doctor"]) == 1
    assert "no vLLM" in capsys.readouterr().out


def test_a_missing_package_names_its_extra() -> None:
    """A server without pandas tells what to install; a missing module of our own stays a bug."""
    with pytest.raises(InputError, match=r"no_such_package.*lorazor\[training\]"), needs_extra("training"):
        import no_such_package  # type: ignore[import-not-found]  # noqa: F401
    with pytest.raises(ModuleNotFoundError), needs_extra("training"):
        import lorazor.no_such_module  # type: ignore[import-not-found]  # noqa: F401


def test_what_another_package_misses_is_not_an_extra_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation of vLLM that lacks something is mended there: no extra of LoRazor has it."""
    (tmp_path / "broken_engine").mkdir()
    (tmp_path / "broken_engine" / "__init__.py").write_text("from broken_engine import parser\n")
    (tmp_path / "broken_engine" / "parser.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InputError, match="broken_engine needs no_such_package") as found, needs_extra("training"):
        import_module("broken_engine")
    assert "lorazor[" not in str(found.value)


def test_stages_are_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """In a log each stage is one line on stderr, and stdout stays for the result."""
    with stages() as show:
        show("first")
        show("second")
    assert capsys.readouterr() == ("", "first\nsecond\n")


def test_stages_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a terminal the stages are drawn on stderr, which keeps stdout for the result."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with stages() as show:
        show("first")
        show("second")
    captured = capsys.readouterr()
    assert "second" in captured.err
    assert captured.out == ""


@pytest.mark.slow
def test_the_life_of_a_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """train, tune, evaluate and inspect through the command line on planted traces, with the JSON of the design."""
    pytest.importorskip("pandas")
    from lorazor.training.traces import write_traces
    from tests.planted import planted_traces

    folders = {name: tmp_path / name for name in ("train", "calibrate", "test")}
    for seed, folder in enumerate(folders.values()):
        traces = planted_traces(600, seed)
        write_traces(folder, traces.steps, traces.rollouts, traces.meta)
    policy, tuned, evaluated = tmp_path / "policy", tmp_path / "tuned.json", tmp_path / "evaluated.json"
    assert main(["train", str(folders["train"]), str(policy), "--no-mlflow"]) == 0
    assert main(["tune", str(policy), str(folders["calibrate"]), "--max-drop", "0.1", "--json", str(tuned)]) == 0
    assert main(["evaluate", str(policy), str(folders["test"]), "--json", str(evaluated)]) == 0
    threshold = json.loads(tuned.read_text())["tasks"]["sql"]["threshold"]
    assert 0 < threshold <= 1
    assert json.loads(evaluated.read_text())["tasks"]["sql"]["threshold"] == threshold
    capsys.readouterr()
    assert main(["inspect", str(policy), "--traces", str(folders["test"])]) == 0
    out = capsys.readouterr().out
    assert "Most important features" in out
    assert " threshold\n" in out
    assert "release step" in out or "never released" in out
    assert main(["inspect", str(policy), "--traces", str(folders["test"]), "--request", "nobody"]) == 2
    assert "'nobody'" in capsys.readouterr().err


@pytest.mark.slow
def test_one_collection_may_have_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What training left out tunes the policy, and nothing else of the collection does."""
    pytest.importorskip("pandas")
    from lorazor.policy.artifact import load_artifact
    from lorazor.training.traces import write_traces
    from tests.planted import planted_traces

    traces, folder, policy = planted_traces(900, 1), str(tmp_path / "traces"), str(tmp_path / "policy")
    write_traces(folder, traces.steps, traces.rollouts, traces.meta)
    tune = ["tune", policy, folder, "--max-drop", "0.1"]
    assert main(["train", folder, policy, "--no-mlflow", "--leave-out", "1.5"]) == 2
    assert "at least 0 and below 1, got 1.5" in capsys.readouterr().err
    assert main(["train", folder, policy, "--no-mlflow", "--leave-out", "0.5", "--without-probes"]) == 0
    seen = len(load_artifact(policy).manifest.trained_on)
    assert not load_artifact(policy).manifest.probes
    assert 400 < seen < 500
    assert main(tune) == 2
    assert main([*tune, "--unseen-only"]) == 0
    guarantee = load_artifact(policy).manifest.tasks["sql"].guarantee
    assert guarantee is not None
    assert guarantee.n == 900 - seen
    assert main(["train", folder, policy, "--no-mlflow"]) == 0
    capsys.readouterr()
    assert main([*tune, "--unseen-only"]) == 2
    assert "train with --leave-out" in capsys.readouterr().err
