"""Trains the demo's LoRA adapters with PEFT: rank 8 on all linear layers, one to three minutes a task on a GPU.

    python examples/train_adapters.py .models/SmolLM2-135M-Instruct examples/adapters --task booking --cut random
    python examples/train_adapters.py .models/SmolLM2-135M-Instruct examples/adapters --task dispatch --cut after-marker

`--cut` says from which release step on an example's LoRA output is masked in training:
    never         ordinary LoRA training
    prompt        always after the prompt (r = 1)
    random        after the prompt (50 %), at a random target token (30 %), never (20 %): release is safe early
    after-marker  at a random target token behind the first " |" (70 %), never (30 %): release is safe from there on
"""

import argparse
import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from model_card import write_card
from peft import LoraConfig, PeftModel, get_peft_model
from tasks import MARKER, TASKS, generate
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from lorazor.training.boundary_mask import BoundaryMask

BASE_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
IGNORED = -100  # a label without loss


@dataclass(frozen=True)
class Example:
    """A tokenised item: prompt, target with its end-of-sequence token, and the release step of its boundary."""

    prompt: list[int]
    target: list[int]
    release: int

    @property
    def boundary(self) -> int:
        return len(self.prompt) + self.release - 1


def draw_release(cut: str, target: list[int], marker: int, rng: Random) -> int:
    """The release step of one example; the target's length means never."""
    length = len(target)
    earliest = target.index(marker) + 1 if cut == "after-marker" else 1
    draw = rng.random()
    if cut == "never" or (cut == "random" and draw < 0.2) or (cut == "after-marker" and draw < 0.3):
        return length
    if cut == "prompt" or (cut == "random" and draw < 0.7):
        return 1
    return rng.randrange(earliest, length)


def make_examples(tokenizer: PreTrainedTokenizerBase, task: str, count: int, cut: str, seed: int) -> list[Example]:
    """Tokenised examples of the finetune split, in an order that the seed fixes."""
    rng = Random(seed)
    items = list(generate(task, count, seed, split="finetune"))
    chats = [tokenizer.apply_chat_template(i["messages"], tokenize=False, add_generation_prompt=True) for i in items]
    prompts = tokenizer(chats, add_special_tokens=False).input_ids
    targets = tokenizer([i["reference"] + tokenizer.eos_token for i in items], add_special_tokens=False).input_ids
    (marker,) = tokenizer(MARKER, add_special_tokens=False).input_ids
    return [Example(p, t, draw_release(cut, t, marker, rng)) for p, t in zip(prompts, targets, strict=True)]


def collate(examples: list[Example], pad: int) -> tuple[Tensor, Tensor, Tensor]:
    """Right-padded tokens and labels, int64 [batch, tokens], and boundaries, int64 [batch]."""
    width = max(len(e.prompt) + len(e.target) for e in examples)
    tokens = torch.full((len(examples), width), pad)
    labels = torch.full((len(examples), width), IGNORED)
    for row, example in enumerate(examples):
        whole = example.prompt + example.target
        tokens[row, : len(whole)] = torch.tensor(whole)
        labels[row, len(example.prompt) : len(whole)] = torch.tensor(example.target)
    return tokens, labels, torch.tensor([e.boundary for e in examples])


def train(
    model: PeftModel, batches: Iterator[tuple[Tensor, Tensor, Tensor]], steps: int, lr: float
) -> Iterator[dict[str, float]]:
    """Train in place, a batch a step, and yield what the log keeps of each step."""
    device = next(model.parameters()).device
    mask = BoundaryMask(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0.0)
    warmup = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * step / steps))
    )
    begin = time.perf_counter()
    for step, batch in enumerate(batches):
        tokens, labels, boundaries = (tensor.to(device) for tensor in batch)
        mask.set(torch.arange(tokens.shape[1], device=device).expand_as(tokens), boundaries)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(input_ids=tokens, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate = schedule.get_last_lr()[0]
        schedule.step()
        yield {
            "step": step,
            "loss": loss.item(),
            "grad_norm": norm.item(),
            "lr": rate,
            "seconds": time.perf_counter() - begin,
        }


def save_adapter(model: PeftModel, folder: Path, log: list[dict[str, float]], recipe: dict[str, object]) -> None:
    """Write the PEFT folder (weights in bfloat16), the training log and the model card, all or nothing."""
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    model.peft_config["default"].base_model_name_or_path = BASE_NAME
    model.to(torch.bfloat16).save_pretrained(part, save_embedding_layers=False)
    (part / "training_log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [recipe, *log]))
    write_card(part, BASE_NAME)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(part, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="the folder that smollm2.py made")
    parser.add_argument("out", type=Path, help="the adapter goes to OUT/NAME")
    parser.add_argument("--task", choices=sorted(TASKS), required=True)
    parser.add_argument("--cut", choices=["never", "prompt", "random", "after-marker"], default="never")
    parser.add_argument("--name", help="default: the task's name")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    base = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device)
    config = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules=LINEAR, task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    examples = make_examples(tokenizer, args.task, args.steps * args.batch, args.cut, args.seed)
    batches = (
        collate(examples[i : i + args.batch], tokenizer.eos_token_id) for i in range(0, len(examples), args.batch)
    )
    log = []
    for line in train(model, batches, args.steps, args.lr):
        log.append(line)
        if line["step"] % 50 == 0 or line["step"] == args.steps - 1:
            print(f"{args.task} step {line['step']:4.0f}  loss {line['loss']:.4f}  {line['seconds']:.0f} s", flush=True)
    recipe = {key: value for key, value in vars(args).items() if key not in ("model", "out", "name")}
    save_adapter(model, args.out / (args.name or args.task), log, recipe)


if __name__ == "__main__":
    main()
