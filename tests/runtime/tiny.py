"""A tiny random Llama with adapters, a plain transformers + PEFT loop to compare with, and vLLM engines over it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

VOCAB, LAYERS, HIDDEN = 128, 3, 64
NEAR_TIE = 0.05  # logits; TF32 has 10 bits of mantissa
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


# Which model runner the tests run on (see v2_on_cpu.py), where its parts are, and whether its steps overlap.
ON_V2 = os.environ.get("LORAZOR_TEST_RUNNER", "").startswith("v2")
PROBING = "lorazor.runtime.scratch.Scratch.place" if ON_V2 else "lorazor.runtime.runner.base_logits"
SIGNALS = "lorazor.runtime.device_step.DeviceStep.run" if ON_V2 else "lorazor.runtime.runner.adapter_signals"
OVERLAP = int(os.environ.get("LORAZOR_TEST_RUNNER") == "v2-async")


@dataclass(frozen=True)
class Tiny:
    """Folders of the base and its adapters."""

    base: str
    adapters: dict[str, str]


def make_tiny(folder: Path, ranks: dict[str, int], seed: int = 0) -> Tiny:
    """Random weights, with adapters strong enough that texts with and without them differ."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.08,
    )
    base = folder / "base"
    LlamaForCausalLM(config).save_pretrained(base)
    _save_tokenizer(base)
    adapters = {}
    for name, rank in ranks.items():
        model = get_peft_model(
            LlamaForCausalLM.from_pretrained(base), LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=TARGETS)
        )
        for key, weight in model.named_parameters():
            if "lora_" in key:
                torch.nn.init.normal_(weight, std=0.5 / math.sqrt(HIDDEN if "lora_A" in key else rank * 4))
        adapters[name] = str(folder / name)
        model.save_pretrained(adapters[name])
    return Tiny(str(base), adapters)


def _save_tokenizer(folder: Path) -> None:
    """One token per printable ASCII character, so that text, stop strings and grammars work."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {chr(k) if 32 <= k < 127 else f"<{k}>": k for k in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<0>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<0>", eos_token="<1>", pad_token="<2>")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    fast.save_pretrained(folder)


class Reference:
    """Greedy decoding in plain transformers + PEFT, the adapter off from the boundary on."""

    def __init__(self, tiny: Tiny) -> None:
        from peft import PeftModel
        from transformers import LlamaForCausalLM

        names = list(tiny.adapters)
        base = LlamaForCausalLM.from_pretrained(tiny.base, dtype=torch.float32)
        self.model = PeftModel.from_pretrained(base, tiny.adapters[names[0]], adapter_name=names[0])
        for name in names[1:]:
            self.model.load_adapter(tiny.adapters[name], adapter_name=name)
        self.model.eval()

    def text(self, prompt: Sequence[int], adapter: str | None, release: int | None, tokens: int) -> list[int]:
        """`tokens` greedy tokens: with `adapter` below the boundary of `release` (None = never), without it after."""
        return [token for token, _ in self.decode(prompt, adapter, release, tokens)]

    @torch.inference_mode()
    def decode(
        self, prompt: Sequence[int], adapter: str | None, release: int | None, tokens: int
    ) -> list[tuple[int, torch.Tensor]]:
        """Like `text`, each token with the logits float32 [V] that it was taken from."""
        cache, fed = None, list(prompt)
        steps: list[tuple[int, torch.Tensor]] = []
        if adapter is not None:
            self.model.set_adapter(adapter)
        while len(steps) < tokens:
            on = adapter is not None and (release is None or len(steps) < release)
            logits, cache = self._forward(fed, cache, on)
            fed = [int(logits.argmax())]
            steps.append((fed[0], logits))
        return steps

    def _forward(self, fed: list[int], cache: Any, on: bool) -> tuple[torch.Tensor, Any]:
        ids = torch.tensor([fed])
        if on:
            result = self.model(ids, past_key_values=cache, use_cache=True)
        else:
            with self.model.disable_adapter():
                result = self.model(ids, past_key_values=cache, use_cache=True)
        return result.logits[0, -1].float(), result.past_key_values

    @torch.inference_mode()
    def base_logits_beside(self, prompt: Sequence[int], adapter: str, tokens: int) -> list[torch.Tensor]:
        """For each decode step of the never-released text, the base's logits over a copy of the adapter's cache."""
        import copy

        self.model.set_adapter(adapter)
        logits, cache = self._forward(list(prompt), None, True)
        beside = []
        for _ in range(tokens - 1):
            token = [int(logits.argmax())]
            beside.append(self._forward(token, copy.deepcopy(cache), False)[0])
            logits, cache = self._forward(token, cache, True)
        return beside


def assert_text(got: Sequence[int], reference: Reference, ask: Ask) -> None:
    """`got` is the reference's text of `ask`: token for token on the CPU; on CUDA up to a near tie of two logits.

    vLLM's float32 attention on CUDA multiplies in TF32, so tokens whose logits nearly tie may swap; texts part there.
    """
    release = ask.release if isinstance(ask.release, int) else None
    steps = reference.decode(ask.prompt, ask.adapter, release, ask.tokens)
    assert len(got) == len(steps)
    for token, (wanted, logits) in zip(got, steps, strict=True):
        if token != wanted:
            assert torch.cuda.is_available(), (list(got), [t for t, _ in steps])
            assert logits[wanted] - logits[token] < NEAR_TIE
            return


def engine(tiny: Tiny, lorazor: dict[str, Any] | None, **options: Any) -> Any:
    """A vLLM engine in this process; `lorazor` None = stock."""
    from vllm import LLM

    settings: dict[str, Any] = {
        "model": tiny.base,
        "dtype": "float32",
        "enable_lora": True,
        "max_loras": 2,
        "max_lora_rank": 16,
        "max_model_len": 256,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "block_size": 16,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 64 << 20,
        "gpu_memory_utilization": 0.05,
        "disable_log_stats": True,
        "seed": 0,
    }
    if lorazor is not None:
        settings["additional_config"] = {"lorazor": lorazor}
    return LLM(**{**settings, **options})


@dataclass(frozen=True)
class Ask:
    """One request of a test: token ids in, greedy token ids out."""

    prompt: tuple[int, ...]
    adapter: str | None = None
    release: int | str | None = None
    tokens: int = 24
    sampling: str = "{}"

    def params(self) -> Any:
        """vLLM sampling parameters; `sampling` is JSON, so that an Ask can be hashed."""
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        extra = {} if self.release is None else {"lorazor_release": self.release}
        settings = {"temperature": 0.0, "ignore_eos": True, **json.loads(self.sampling)}
        if "structured_outputs" in settings:
            settings["structured_outputs"] = StructuredOutputsParams(**settings["structured_outputs"])
        return SamplingParams(max_tokens=self.tokens, extra_args=extra, **settings)


def run(llm: Any, tiny: Tiny, asks: Sequence[Ask]) -> list[Any]:
    """All requests at once; RequestOutputs in order."""
    prompts = [{"prompt_token_ids": list(a.prompt)} for a in asks]
    loras = [lora(tiny, a.adapter) for a in asks]
    return llm.generate(prompts, [a.params() for a in asks], lora_request=loras, use_tqdm=False)  # type: ignore[no-any-return]


def lora(tiny: Tiny, adapter: str | None) -> Any:
    """The LoRARequest of an adapter by name."""
    from vllm.lora.request import LoRARequest

    if adapter is None:
        return None
    return LoRARequest(adapter, 1 + list(tiny.adapters).index(adapter), tiny.adapters[adapter])


def tokens(output: Any, index: int = 0) -> list[int]:
    """The token ids of one output."""
    return list(output.outputs[index].token_ids)


def released_at(output: Any) -> int | None:
    """The release step that the client is told."""
    return output.kv_transfer_params["lorazor"]["release_step"]  # type: ignore[no-any-return]


def worker(llm: Any) -> Any:
    """The engine's worker, which lives in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def scheduler(llm: Any) -> Any:
    """The engine's scheduler."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def watch_preemptions(llm: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int | None]]:
    """From now on, for each preemption: the tokens that the request had computed, and its boundary if it has one."""
    preempted: list[tuple[int, int | None]] = []
    stock = scheduler(llm)._preempt_request

    def watch(request: Any, *args: Any, **kwargs: Any) -> None:
        preempted.append((request.num_computed_tokens, getattr(request, "boundary", None)))
        stock(request, *args, **kwargs)

    monkeypatch.setattr(scheduler(llm), "_preempt_request", watch)
    return preempted


def counts(llm: Any, name: str) -> dict[str, int]:
    """Totals of one counter by its label values, joined with "/"."""
    (status,) = llm.collective_rpc("lorazor_status")
    return {"/".join(labels.values()): n for metric, labels, n in status["counts"] if metric == name}


def prompt(seed: int, length: int) -> tuple[int, ...]:
    """A random prompt."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, VOCAB, (length,), generator=generator).tolist())
