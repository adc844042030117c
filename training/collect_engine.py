"""The engine behind a collection: submit runs, step, and fetch the signals of the never-released ones.

`Engine` is all that the rest of `collect` knows of vLLM; `VllmEngine` is vLLM with the LoRazor plugin in record mode.
It stays in this process: signals then come home as numpy arrays (vLLM's message format between processes drops them),
and the order in which runs join a batch depends on nothing but the order in which they were submitted.
"""

from __future__ import annotations

import inspect
import json
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from lorazor.features.errors import InputError
from lorazor.training.config import CollectConfig, Sampling, unknown

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM's max_lora_rank may be
Release = int | Literal["never"]


@dataclass(frozen=True)
class Run:
    """One pass of a request through the engine; `adapter` None is the base alone, `seed` None is greedy."""

    key: str
    prompt: tuple[int, ...]
    adapter: str | None
    release: Release | None
    max_tokens: int
    sampling: Sampling
    seed: int | None


@dataclass(frozen=True)
class Output:
    """What a run ended with; `release_step` is what the runtime says it did."""

    key: str
    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    release_step: int | None


@dataclass(frozen=True)
class Signals:
    """Of a never-released run: tokens int32[L], signals float32[L, 4], probes float32[L, 5] (NaN = unprobed)."""

    tokens: npt.NDArray[np.int32]
    signals: npt.NDArray[np.float32]
    probes: npt.NDArray[np.float32]


class Engine(Protocol):
    """Continuous batching over submitted runs. Keys are the caller's and unique among unfinished runs."""

    max_model_len: int

    def encode(self, row: dict[str, Any]) -> tuple[int, ...]:
        """The prompt tokens of a row's `prompt` or `messages`."""

    def submit(self, run: Run) -> None:
        """Queue a run; they start in this order."""

    def step(self) -> list[Output]:
        """Run one step of the batch and return what finished in it."""

    def take_signals(self, keys: list[str]) -> dict[str, Signals]:
        """Return and forget the signals of finished never-released runs."""

    def reset(self) -> None:
        """Forget cached prefixes and untaken signals, so that what follows does not depend on what came before."""


class VllmEngine:
    """vLLM in record mode. Starting it takes half a minute on a CPU, more for larger models.

    Raises:
        InputError: vLLM is missing, an engine option is unknown, or vLLM refuses the configuration.
    """

    def __init__(self, config: CollectConfig) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        try:
            from vllm import LLM
            from vllm.engine.arg_utils import EngineArgs
            from vllm.lora.request import LoRARequest
        except ImportError as error:
            raise InputError(f"collect needs vLLM, which cannot be imported here: {error}") from error
        known = set(inspect.signature(LLM.__init__).parameters) | {field.name for field in fields(EngineArgs)}
        for option in config.engine:
            if option not in known:
                raise InputError(unknown("engine option", option, known - {"self", "kwargs"}))
        try:
            self._llm = LLM(model=str(config.base), **engine_options(config))
        except (ValueError, TypeError) as error:
            raise InputError(f"vLLM does not start with this configuration: {' '.join(str(error).split())}") from error
        self._engine = self._llm.llm_engine
        self._tokenizer = self._llm.get_tokenizer()
        self.max_model_len = int(self._engine.model_config.max_model_len)
        self._adapters = {
            name: LoRARequest(name, number, str(path.absolute()))
            for number, (name, path) in enumerate(config.adapters.items(), 1)
        }
        self._internal: dict[str, str] = {}  # our key -> the id that vLLM made of it

    def encode(self, row: dict[str, Any]) -> tuple[int, ...]:
        """See `Engine`; a chat goes through the base's own chat template."""
        if "prompt" in row:
            return tuple(self._tokenizer.encode(row["prompt"]))
        try:
            text = self._tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template is a program of the model's makers and raises what it likes
            raise InputError(f"the base's chat template does not take these messages: {error}") from error
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def submit(self, run: Run) -> None:
        """See `Engine`."""
        from vllm.inputs import tokens_input

        prompt = tokens_input(list(run.prompt))
        lora = self._adapters[run.adapter] if run.adapter is not None else None
        internal = self._engine.add_request(run.key, prompt, sampling_params(run), lora_request=lora)
        self._internal[run.key] = internal or run.key

    def step(self) -> list[Output]:
        """See `Engine`."""
        return [_output(output) for output in self._engine.step() if output.finished]

    def take_signals(self, keys: list[str]) -> dict[str, Signals]:
        """See `Engine`; with tensor parallelism every worker has the same, so the first one's count."""
        internal = {self._internal.pop(key): key for key in keys}
        workers = self._llm.collective_rpc("lorazor_traces", args=(list(internal),))
        found = {request: trace for worker in reversed(workers) for request, trace in (worker or {}).items()}
        return {internal[request]: _signals(trace) for request, trace in found.items()}

    def reset(self) -> None:
        """See `Engine`."""
        self._llm.collective_rpc("lorazor_traces", args=(None,))
        self._llm.reset_prefix_cache()
        self._internal.clear()


def engine_options(config: CollectConfig) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`: ours, then the configuration's.

    One adapter slot is enough: a shard holds one task, hence one adapter.
    """
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": len(config.adapters),
        "max_lora_rank": _max_rank(config),
        "additional_config": {"lorazor": {"record": True, "probe_interval": config.probe_interval}},
        **config.engine,
    }


def sampling_params(run: Run) -> Any:
    """vLLM's SamplingParams of a run; only the finished output is handed out."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    settings = run.sampling.model_dump(exclude={"seed"})
    extra = {"lorazor_release": run.release} if run.release is not None else None
    return SamplingParams(
        **settings,
        seed=run.seed,
        max_tokens=run.max_tokens,
        extra_args=extra,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _max_rank(config: CollectConfig) -> int:
    largest = max(_rank(path) for path in config.adapters.values())
    fitting = [rank for rank in LORA_RANKS if rank >= largest]
    if not fitting:
        raise InputError(f"an adapter has rank {largest}, vLLM takes at most {LORA_RANKS[-1]}")
    return fitting[0]


def _rank(adapter: Path) -> int:
    path = adapter / "adapter_config.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        return max([int(settings["r"]), *map(int, settings.get("rank_pattern", {}).values())])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: not the configuration of a LoRA adapter ({type(error).__name__}: {error})") from None


def _output(output: Any) -> Output:
    text = output.outputs[0]
    told = (output.kv_transfer_params or {}).get("lorazor") or {}
    release = told.get("release_step")
    return Output(output.request_id, text.text, tuple(text.token_ids), str(text.finish_reason), release)


def _signals(trace: dict[str, Any]) -> Signals:
    return Signals(
        np.asarray(trace["token_ids"], np.int32),
        np.asarray(trace["signals"], np.float32),
        np.asarray(trace["probes"], np.float32),
    )
