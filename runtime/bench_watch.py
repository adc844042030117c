"""What a server under `lorazor bench` says of itself: counters, release steps, KV blocks, and its memory."""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

# Statistics of the last step arrive a moment after its response.
SETTLE_S = 0.5
QUEUE_SUM, QUEUE_COUNT = "vllm:request_queue_time_seconds_sum", "vllm:request_queue_time_seconds_count"
STOCK_SAMPLES = (QUEUE_SUM, QUEUE_COUNT, "vllm:num_preemptions_total")
# Of a histogram, sum and count are kept: a bench knows every release step itself.
UNKEPT = ("_created", "_bucket")
# A server on this machine is asked directly, whatever proxy the environment names.
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


def get(url: str, seconds: float = 60) -> str:
    """The body of GET `url`; OSError (urllib.error.HTTPError for a status of 400 and more) where there is none."""
    with _open(url, timeout=seconds) as answer:
        return str(answer.read().decode())


def healthy(url: str) -> bool:
    """Whether GET /health says so."""
    try:
        get(f"{url}/health", 5)
    except OSError:
        return False
    return True


def counters(url: str) -> dict[str, float]:
    """The counters that a bench keeps: all of ours, by name and labels, and those of STOCK_SAMPLES."""
    samples = list(_samples(url))
    ours = {
        name if not labels else f"{name}{json.dumps(labels, sort_keys=True)}": value
        for name, labels, value in samples
        if name.startswith("lorazor_") and not name.endswith(UNKEPT)
    }
    return ours | {name: sum(value for other, _, value in samples if other == name) for name in STOCK_SAMPLES}


def _samples(url: str) -> Iterable[tuple[str, dict[str, str], float]]:
    from prometheus_client.parser import text_string_to_metric_families

    for family in text_string_to_metric_families(get(f"{url}/metrics")):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value


def grown(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """By how much each counter grew; those that did not are left out."""
    return {name: value - before.get(name, 0.0) for name, value in after.items() if value != before.get(name, 0.0)}


def queue_ms(counts: Mapping[str, float]) -> float | None:
    """Mean time from a request's arrival to its first place in a batch; waiting for an adapter slot is part of it."""
    return 1000 * counts.get(QUEUE_SUM, 0.0) / counts[QUEUE_COUNT] if counts.get(QUEUE_COUNT) else None


def kv_blocks(url: str) -> int | None:
    """Blocks of the KV cache."""
    for name, labels, _ in _samples(url):
        if name == "vllm:cache_config_info" and labels.get("num_gpu_blocks", "").isdecimal():
            return int(labels["num_gpu_blocks"])
    return None


def release_steps(url: str, request_ids: Iterable[str]) -> list[int | None]:
    """The release step of each completion, by the id that its body carried; None: not released, or not known."""
    return [_release_step(url, request_id) for request_id in request_ids]


def _release_step(url: str, request_id: str) -> int | None:
    try:
        answer = json.loads(get(f"{url}/lorazor/requests/cmpl-{quote(request_id)}"))
    except urllib.error.HTTPError as error:
        if error.code == 404:  # it failed before it reached the engine
            return None
        raise
    step = answer["release_step"]
    return None if step is None else int(step)


def memory(pid: int) -> dict[str, int | None]:
    """Bytes of a server's processes: the peak of their resident memory, and on the GPU now (vLLM gives none back).

    Pages that processes share are counted in each. `gpu` is null without a GPU, and where its driver hides processes.
    """
    import psutil  # type: ignore[import-untyped]  # vLLM brings it, without types

    parent = psutil.Process(pid)
    pids = {pid, *(child.pid for child in parent.children(recursive=True))}
    on_gpu = [used for owner, used in _gpu_processes() if owner in pids and used is not None]
    return {"peak_rss": sum(map(_peak_rss, pids)), "gpu": sum(on_gpu) if on_gpu else None, "gpu_device": _gpu_used()}


def _peak_rss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import platform

    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"system": platform.platform(), "cpus": cpus, "gpus": _with_gpus(lambda n, h: str(n.nvmlDeviceGetName(h)))}


def _gpu_processes() -> list[tuple[int, int | None]]:
    found = _with_gpus(lambda n, h: [(p.pid, p.usedGpuMemory) for p in n.nvmlDeviceGetComputeRunningProcesses(h)])
    return [process for processes in found for process in processes]


def _gpu_used() -> int | None:
    """In use on all GPUs, by whomever."""
    return sum(_with_gpus(lambda nvml, handle: int(nvml.nvmlDeviceGetMemoryInfo(handle).used))) or None


def _with_gpus(ask: Any) -> list[Any]:
    """`ask(nvml, handle)` of every NVIDIA GPU; nothing where there is no driver."""
    from vllm.third_party import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
        return [ask(pynvml, handle) for handle in handles]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()
