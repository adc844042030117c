"""The base model with the LoRA adapter to be trained, and its tokenizer, from a local folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate.utils.other import is_repeated_blocks
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed

from lorazor.features.errors import InputError
from lorazor.policy.fingerprint import ADAPTER_WEIGHTS
from lorazor.training.config import unknown
from lorazor.training.finetune_config import ALL_LINEAR, FinetuneConfig

# What the boundary's mask lets go of: it does not reach embeddings, biases, magnitudes and whole layers.
PLAIN = (".lora_A.", ".lora_B.")


def load_tokenizer(folder: Path) -> Any:
    """The base's tokenizer; InputError when it is missing or knows no end-of-sequence token."""
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder}: not a model folder (it has no config.json)")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise InputError(f"{folder}: no usable tokenizer: {_line(error)}") from None
    if tokenizer.eos_token_id is None:
        raise InputError(f"{folder}: the tokenizer has no end-of-sequence token, so targets could not end")
    return tokenizer


def token_limit(config: FinetuneConfig) -> int:
    """The most tokens of an example: what was asked, and no more than the base has positions for."""
    most = getattr(AutoConfig.from_pretrained(config.model), "max_position_embeddings", None)
    return min(config.max_length, most or config.max_length)


def load_lora(config: FinetuneConfig) -> Any:
    """A PEFT model whose adapter is that of `init` or new, by the seed: float32, over a base in float32 or bfloat16.

    Raises:
        InputError: the folder holds no causal language model, a target is not one of its linear layers, or `init` does
            not fit.
    """
    set_seed(config.seed)
    dtype = torch.bfloat16 if config.bf16 else torch.float32
    try:
        base = AutoModelForCausalLM.from_pretrained(config.model, dtype=dtype)
    except (OSError, ValueError) as error:
        raise InputError(f"{config.model}: no usable causal language model: {_line(error)}") from None
    if config.gradient_checkpointing:
        base.gradient_checkpointing_enable({"use_reentrant": False})
    if config.init is not None:
        return _load_init(base, config.init)
    _check_targets(config, base)
    targets: str | list[str] = ALL_LINEAR if config.targets == (ALL_LINEAR,) else list(config.targets)
    lora = LoraConfig(r=config.rank, lora_alpha=config.lora_alpha, target_modules=targets, task_type="CAUSAL_LM")
    return get_peft_model(base, lora)


def _load_init(base: Any, init: Path) -> Any:
    try:
        model = PeftModel.from_pretrained(base, init, is_trainable=True)
        with safe_open(init / ADAPTER_WEIGHTS, framework="pt") as file:
            held = set(file.keys())
    except (OSError, ValueError, RuntimeError) as error:
        # torch lists each layer that differs, a line each.
        raise InputError(f"--init {init} does not fit the base: {_line(error, 2)}") from None
    for name, weight in model.named_parameters():
        if weight.requires_grad and not any(part in name for part in PLAIN):
            raise InputError(f"--init {init} is no plain LoRA: {name} could not be let go")
    # PEFT only warns of these, and would begin anew where a weight is missing.
    odd = sorted(held ^ set(get_peft_model_state_dict(model, save_embedding_layers=False)))
    if odd:
        raise InputError(f"--init {init} does not fit the base: {odd[0]} is in one of them alone")
    return model


def compile_layers(model: nn.Module) -> None:
    """Have torch.compile fuse the model's decoder layers; all share one compiled code, whatever the batch's shape.

    In place, so the weights keep their names. The boundary mask's hooks must be there by now.
    """
    # What hangs on a module's hook, as the mask does, is otherwise compiled for one shape.
    torch._dynamo.config.force_nn_module_property_static_shapes = False
    for layers in filter(is_repeated_blocks, model.modules()):
        for layer in layers:
            layer.compile(dynamic=True)


def _check_targets(config: FinetuneConfig, base: Any) -> None:
    linear = {name.rpartition(".")[2] for name, module in base.named_modules() if isinstance(module, nn.Linear)}
    for target in config.targets:
        if target not in linear and config.targets != (ALL_LINEAR,):
            raise InputError(f"{config.model}: {unknown('target module', target, linear | {ALL_LINEAR})}")


def _line(error: Exception, most: int | None = None) -> str:
    return " ".join(" ".join(str(error).splitlines()[:most]).split())
