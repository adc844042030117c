"""Everything of vLLM that is replaced at run time, with its reason: the ledger. A test holds it against what exists.

vLLM's named hooks (worker_cls, scheduler_cls, stat-logger and endpoint plugins) are no patches and not listed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Patch:
    """One replaced attribute: `target` in `where`, why no named hook does, and when it can go."""

    where: str
    target: str
    why: str
    until: str


LEDGER = (
    Patch(
        "vllm.platforms.current_platform (its class)",
        "check_and_update_config",
        "a general plugin is given no config, and `--additional-config` alone must choose our worker and scheduler",
        "vLLM lets a plugin see the config before worker_cls is resolved",
    ),
    Patch(
        "the API process's InputProcessor (its class)",
        "_validate_params",
        "a bad `vllm_xargs` must be told to the client as HTTP 400; a logits processor could, but moves V2 to V1",
        "vLLM lets a plugin validate extra_args",
    ),
    Patch(
        "the worker's model runner, V1 or V2 (instance)",
        "__class__",
        "the worker builds its runner by name; the subclass only adds methods, so the built object can take it",
        "vLLM has a runner_cls",
    ),
    Patch(
        "the model runner V2 (instance)",
        "lora_state",
        "stock makes a Python object of every token of every step; ours gives arrays",
        "vLLM's LoraState does",
    ),
    Patch(
        "the model on runner V2 with releases (instance)",
        "compute_logits",
        "signals need the logits before grammar and sampler write into them; V2 computes and samples in one call",
        "vLLM hands out raw logits",
    ),
    Patch(
        "the model on runner V2 with releases (instance)",
        "forward",
        "a probe is a second pass over the step's own inputs, which V2 builds and runs in one call",
        "vLLM has a hook between preparing a step and running it",
    ),
    Patch(
        "runner V2's cudagraph_manager with releases (instance)",
        "run_fullgraph",
        "as `forward`, which a full graph does not call",
        "as `forward`",
    ),
    Patch(
        "LoRA requests in the scheduler (instances)",
        "__class__",
        "`lora_request` must read as None once a request is past its boundary, wherever the scheduler looks",
        "Request has a hook for the adapter in use",
    ),
    Patch(
        "the scheduler (instance)",
        "waiting",
        "stock looks in every step at every request that gets no adapter slot, and lets resident adapters overtake",
        "vLLM's queues know adapters",
    ),
    Patch("the scheduler (instance)", "skipped_waiting", "as `waiting`", "as `waiting`"),
    Patch(
        "the worker's LoRA model manager (instance)",
        "activate_adapter",
        "stock fills a slot with hundreds of copies in the middle of a step; ours, from an image made beforehand",
        "vLLM lets a plugin name the manager's class",
    ),
    Patch(
        "LoRA layers of the model (instances)",
        "punica_wrapper",
        "CUDA: stock kernels cost the same for released rows, and their preparation waits for the GPU; in float32 they "
        "refuse. CPU: they take index -1 (no adapter) for the last slot's adapter (vLLM PRs 48421, 49656)",
        "vLLM lets a plugin choose the wrapper",
    ),
)


def apply_patches() -> None:
    """Wrap the platform's check_and_update_config once per process."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    original = platform.check_and_update_config
    if not hasattr(original, "lorazor_original"):
        platform.check_and_update_config = classmethod(_checking(original.__func__))


def _checking(original: Callable[..., None]) -> Callable[..., None]:
    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        from lorazor.runtime.config import runtime_config

        config = runtime_config(vllm_config.additional_config)
        if config is not None:
            from vllm.v1.engine.input_processor import InputProcessor

            from lorazor.runtime.setup import prepare
            from lorazor.runtime.validate import install

            prepare(vllm_config)
            install(InputProcessor)
        original(cls, vllm_config)

    check_and_update_config.lorazor_original = original  # type: ignore[attr-defined]
    return check_and_update_config
