"""What the serving tests stand on beside the tiny model: a tokenizer for it, and adapter folders made by hand."""

from __future__ import annotations

import json
from pathlib import Path

from tests.runtime.tiny import VOCAB

CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def add_tokenizer(base: str) -> None:
    """Give the tiny model a tokenizer of one token per ASCII character, and a chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({chr(code): code for code in range(VOCAB)}, unk_token="\x00"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="\x00")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(base)


def write_adapter_folder(folder: Path, *, config: object = None, weights: bool = True) -> str:
    """An adapter folder that passes for one until its weights are read."""
    folder.mkdir(parents=True)
    if config is not None:
        (folder / "adapter_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if weights:
        (folder / "adapter_model.safetensors").write_bytes(b"")
    return str(folder)
