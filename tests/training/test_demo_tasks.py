"""The demo's task generators and the boundary mask that its adapters are trained and measured with."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from examples.boundary_mask import BoundaryMask
from examples.tasks import CODES, MARKER, TASKS, generate, score


@pytest.mark.parametrize("task", sorted(TASKS))
def test_prompts_are_distinct_seeded_and_never_shared_between_the_splits(task: str) -> None:
    """Equal seeds give equal items; no prompt occurs twice, nor in both splits."""
    collect = list(generate(task, 400, seed=1))
    finetune = list(generate(task, 400, seed=1, split="finetune"))
    assert collect == list(generate(task, 400, seed=1))
    assert len({item["messages"][0]["content"] for item in collect + finetune}) == 800
    assert len({item["id"] for item in collect + finetune}) == 800


def test_dispatch_references_hold_the_codes_in_order_and_then_the_note() -> None:
    """The reference follows from the prompt's items and note; code counts from one to eight all occur."""
    counts = set()
    for item in generate("dispatch", 200):
        goods, note = item["messages"][0]["content"].split("Items: ")[1].split("\nNote: ")
        codes = [CODES[good] for good in goods.split(", ")]
        assert item["reference"] == f"{' '.join(codes)}{MARKER} {note}"
        counts.add(len(codes))
    assert counts == set(range(1, 9))
    assert len(set(CODES.values())) == len(CODES)


def test_booking_references_hold_the_facts_of_the_sentence() -> None:
    """Place, time, name and wish of a card stand in its sentence."""
    for item in generate("booking", 200):
        place, when, _guests, name, wish = item["reference"].split(MARKER + " ")
        sentence = item["messages"][0]["content"]
        assert all(fact in sentence for fact in (place, when[:3], when[4:], name, wish))


def test_score_is_exact_but_for_white_space_at_the_ends() -> None:
    """Only the reference itself, padded or not, scores 1."""
    assert score(" BX4 | hello\n", "BX4 | hello") == 1.0
    assert score("BX4 |  hello", "BX4 | hello") == 0.0


def tiny_peft_model() -> Any:
    """A two-layer Llama whose LoRA changes its output."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(LlamaForCausalLM(config), lora).eval()


def test_boundary_mask_spans_from_the_plain_adapter_to_the_plain_base() -> None:
    """Boundary 0 is the base, one past the end the adapter, and in between only the tokens from it on change."""
    model = tiny_peft_model()
    tokens = torch.arange(12).reshape(2, 6)
    with torch.inference_mode():
        adapter = model(input_ids=tokens).logits
        with model.disable_adapter():
            base = model(input_ids=tokens).logits
        mask = BoundaryMask(model)
        mask.set(torch.arange(6).expand(2, 6), torch.tensor([0, 6]))
        ends = model(input_ids=tokens).logits
        mask.set(torch.arange(6).expand(2, 6), torch.tensor([3, 3]))
        middle = model(input_ids=tokens).logits
    torch.testing.assert_close(ends[0], base[0])
    torch.testing.assert_close(ends[1], adapter[1])
    torch.testing.assert_close(middle[:, :3], adapter[:, :3])
    assert (middle[:, 3:] - adapter[:, 3:]).abs().amax(-1).min() > 1e-3
    assert (middle[:, 3:] - base[:, 3:]).abs().amax(-1).min() > 1e-3


def test_boundary_mask_refuses_a_model_without_an_adapter() -> None:
    """A plain model has nothing to mask."""
    with pytest.raises(ValueError, match="no LoRA adapter"):
        BoundaryMask(nn.Linear(2, 2))
