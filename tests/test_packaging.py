"""The layout: what the wheel holds, and which package may import which."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("features", "kernels", "policy", "runtime", "training")
# One direction: a package may import itself and what stands here.
MAY_IMPORT = {
    "features": set(),
    "policy": {"features"},
    "kernels": set(),
    "runtime": {"features", "policy", "kernels", "training"},
    "training": {"features", "policy"},
}
# The composition root: the only place where runtime code reaches for training.
COMMAND_LINE = {"cli_bench_run.py", "cli_data.py", "cli_drawing.py", "cli_finetune.py", "cli_policy.py"}
# The study's end-to-end stage: the only place where training starts a server.
SERVERS = Path("training", "study", "servers.py")


def imports(path: Path) -> set[str]:
    """Every module name that a file imports, at its top or inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def test_every_package_is_named_for_the_wheel() -> None:
    """A subpackage that pyproject does not name would be missing from the wheel without a word."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {p.parent for name in PACKAGES for p in (ROOT / name).rglob("__init__.py")}
    named = {"lorazor." + ".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert set(tool["packages"]) == named
    assert tool["package-dir"] == {f"lorazor.{name}": name for name in PACKAGES}


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_one_way(package: str) -> None:
    """features <- policy <- runtime, kernels <- runtime, training -> features, policy, and runtime for servers."""
    for path in (ROOT / package).rglob("*.py"):
        ours = {name.split(".")[1] for name in imports(path) if name.startswith("lorazor.")}
        allowed = MAY_IMPORT[package] | {package}
        if package == "runtime" and path.name not in COMMAND_LINE:
            allowed = allowed - {"training"}
        if path.relative_to(ROOT) == SERVERS:
            allowed = allowed | {"runtime"}
        assert ours <= allowed, f"{path} imports {sorted(ours - allowed)}"


@pytest.mark.parametrize("package", [p for p in PACKAGES if p != "runtime"])
def test_only_runtime_needs_vllm_at_import(package: str) -> None:
    """Every module outside runtime/ imports in a process where vLLM cannot be imported."""
    files = [p.relative_to(ROOT).with_suffix("") for p in (ROOT / package).rglob("*.py")]
    modules = ["lorazor." + ".".join(f.parts) for f in files if not f.name.startswith("__")]
    program = "import sys; sys.modules['vllm'] = None\n" + "\n".join(f"import {m}" for m in modules)
    # model_probe is a program of its own: importing it runs it.
    program = program.replace("\nimport lorazor.policy.model_probe", "")
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr


def test_a_server_needs_no_training_packages() -> None:
    """The runtime's modules, and loading a policy's code, work without mlflow, scikit-learn, pandas and pyarrow."""
    modules = ["config", "core", "guard", "recorder", "reports", "serve", "endpoints", "metrics", "cli"]
    blocked = ["mlflow", "sklearn", "pandas", "pyarrow", "mapie", "matplotlib"]
    program = "import sys\n" + "".join(f"sys.modules[{name!r}] = None\n" for name in blocked)
    program += "\n".join(f"import lorazor.runtime.{m}" for m in modules) + "\nimport lorazor.policy.artifact"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr


def test_no_pickle_anywhere() -> None:
    """Nothing of ours reads or writes a format that runs code on load."""
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            assert not imports(path) & {"pickle", "joblib", "cloudpickle", "dill", "marshal", "shelve"}, path
