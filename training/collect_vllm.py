"""vLLM with the LoRazor plugin in record mode, as the engine of a collection.

It stays in this process: signals then come home as numpy arrays (vLLM's message format between processes drops them),
and the order in which runs join a batch depends on nothing but the order in which they were submitted.
"""

from __future__ import annotations

import inspect
import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from lorazor.features.errors import InputError
from lorazor.training.collect_data import encode_prompt
from lorazor.training.collect_engine import Output, Run, Signals
from lorazor.training.config import CollectConfig, unknown

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM's max_lora_rank may be
CONTEXT_TOKENS = 5  # of the prompt, in decoding what follows it; vLLM takes as many


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
        self._forked: dict[str, Run] = {}

    def encode(self, row: dict[str, Any]) -> tuple[int, ...]:
        """See `Engine`."""
        return tuple(encode_prompt(self._tokenizer, row))

    def submit(self, run: Run) -> None:
        """See `Engine`."""
        from vllm.inputs import tokens_input

        prompt = tokens_input([*run.prompt, *run.prefix])
        lora = self._adapters[run.adapter] if run.adapter is not None else None
        internal = self._engine.add_request(run.key, prompt, sampling_params(run), lora_request=lora)
        self._internal[run.key] = internal or run.key
        if run.prefix:
            self._forked[run.key] = run

    def step(self) -> list[Output]:
        """See `Engine`."""
        outputs = [_output(output) for output in self._engine.step() if output.finished]
        return [self._with_prefix(output) for output in outputs]

    def _with_prefix(self, output: Output) -> Output:
        run = self._forked.pop(output.key, None)
        if run is None:
            return output
        tokens = (*run.prefix, *output.tokens)
        text = self.text_of(run, tokens, output.finish_reason)
        release = None if output.release_step is None else output.release_step + len(run.prefix)
        return Output(output.key, text, tokens, output.finish_reason, release)

    def text_of(self, run: Run, tokens: tuple[int, ...], finish_reason: str) -> str:
        """See `Engine`; the token that ends a text is no part of it, and neither is the stop string."""
        text = self._decode_after(run.prompt, tokens)
        if finish_reason != "stop":
            return text
        found = [text.index(mark) for mark in run.sampling.stop if mark in text]
        return text[: min(found)] if found else self._decode_after(run.prompt, tokens[:-1])

    def _decode_after(self, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> str:
        """Many tokenizers drop the blank before a first word, so the end of the prompt is decoded with the tokens."""
        before = list(prompt[-CONTEXT_TOKENS:])
        head = str(self._tokenizer.decode(before, skip_special_tokens=True))
        return str(self._tokenizer.decode([*before, *tokens], skip_special_tokens=True)).removeprefix(head)

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
        self._forked.clear()


def engine_options(config: CollectConfig) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`: ours, then the configuration's.

    One adapter slot is enough: a shard holds one task, hence one adapter.
    """
    from vllm.platforms import current_platform

    # vLLM's CPU backend dies on a seeded request whose prompt comes in chunks (its generators have no offset).
    sampled = any(not task.sampling.greedy for task in config.tasks.values())
    whole_prompts = {"enable_chunked_prefill": False} if sampled and current_platform.is_cpu() else {}
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": len(config.adapters),
        "max_lora_rank": _max_rank(config),
        "additional_config": {"lorazor": {"record": True, "probe_interval": config.probe_interval}},
        **whole_prompts,
        **config.engine,
    }


def sampling_params(run: Run) -> Any:
    """vLLM's SamplingParams of a run; only the finished output is handed out."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    settings = run.sampling.model_dump(exclude={"seed"})
    given = len(run.prefix)
    release = run.release - given if isinstance(run.release, int) else run.release
    extra = {"lorazor_release": release} if release is not None else None
    return SamplingParams(
        **settings,
        seed=run.seed,
        max_tokens=run.max_tokens - given,
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
