"""The boundary mask against decoding step by step, and where its gradients go."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from lorazor.training.boundary_mask import BoundaryMask
from lorazor.training.finetune_data import IGNORED, Example, boundaries, collate, positions

pytestmark = pytest.mark.usefixtures("one_thread")
EXAMPLES = [  # prompts and targets of different lengths, so that every batch is padded
    Example(0, (5, 9, 11, 3), (7, 21, 30, 4, 17, 2)),
    Example(1, (8, 2, 40, 33, 12, 6, 19), (13, 50, 1)),
    Example(2, (60, 10), (41, 42, 43, 44, 45)),
]
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


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
    lora = LoraConfig(r=4, target_modules=LINEAR, init_lora_weights=False)
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
        mask.clear()
        cleared = model(input_ids=tokens).logits
    torch.testing.assert_close(ends[0], base[0])
    torch.testing.assert_close(ends[1], adapter[1])
    torch.testing.assert_close(middle[:, :3], adapter[:, :3])
    assert (middle[:, 3:] - adapter[:, 3:]).abs().amax(-1).min() > 1e-3
    assert (middle[:, 3:] - base[:, 3:]).abs().amax(-1).min() > 1e-3
    torch.testing.assert_close(cleared, adapter)


def test_boundary_mask_refuses_a_model_without_an_adapter() -> None:
    """A plain model has nothing to mask."""
    with pytest.raises(ValueError, match="no LoRA adapter"):
        BoundaryMask(nn.Linear(2, 2))


def decoded(model: Any, example: Example, release: int) -> Tensor:
    """Logits [target tokens, V] of a decode with a KV cache: adapter off from position P + r - 1 on, by PEFT itself."""
    fed, cache, logits = list(example.prompt), None, []
    for step, token in enumerate(example.target):
        if step < release:  # the token before output token `step` has position P + step - 1 < P + r - 1
            result = model(torch.tensor([fed]), past_key_values=cache, use_cache=True)
        else:
            with model.disable_adapter():
                result = model(torch.tensor([fed]), past_key_values=cache, use_cache=True)
        cache, fed = result.past_key_values, [token]
        logits.append(result.logits[0, -1])
    return torch.stack(logits)


@pytest.mark.parametrize("side", ["right", "left", "both"])
@pytest.mark.parametrize("releases", [(1, 1, 1), (2, 3, 1), (4, 2, 5), (6, 3, 3)])
def test_a_masked_forward_is_a_decode_that_lets_go(releases: tuple[int, ...], side: str) -> None:
    """One training pass gives every target token the logits of the decode step by step, whatever the padding."""
    model = tiny_peft_model()
    with torch.inference_mode():
        wanted = [decoded(model, *pair) for pair in zip(EXAMPLES, releases, strict=True)]
        batch = collate(EXAMPLES, pad=0)
        width = batch["input_ids"].shape[1]
        for row, length in enumerate(batch["attention_mask"].sum(1).tolist()):
            shift = {"right": 0, "left": width - length, "both": (width - length) // 2}[side]
            for name, value in (("input_ids", 0), ("attention_mask", 0), ("labels", IGNORED)):
                rolled = batch[name][row].roll(shift)
                rolled[:shift] = value
                batch[name][row] = rolled
        places, mask = positions(batch["attention_mask"]), BoundaryMask(model)
        mask.set(places, boundaries(batch, torch.tensor(releases)))
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"], position_ids=places).logits
    for row, expected in enumerate(wanted):
        got = logits[row, :-1][batch["labels"][row, 1:] != IGNORED]
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


def test_the_loss_after_the_prompt_trains_through_keys_and_values_alone() -> None:
    """Cut after the prompt: no gradient past the boundary, some before it, and in the last layer only at K and V."""
    model = tiny_peft_model()
    outputs: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            output.retain_grad()
            outputs[name] = output

        return hook

    for name, module in model.named_modules():
        if name.endswith("lora_B.default"):
            module.register_forward_hook(keep(name))  # before the mask's own hook: sees the branch as it was
    batch = collate(EXAMPLES, pad=0)
    ends = boundaries(batch, torch.tensor([1, 1, 1]))
    places = positions(batch["attention_mask"])
    BoundaryMask(model).set(places, ends)
    # Of the target's first token the last prompt token decides, which has the adapter: leave it out.
    labels = batch["labels"].masked_fill(places == ends[:, None], IGNORED)
    model(batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss.backward()
    past = places >= ends[:, None]
    for name, output in outputs.items():
        assert output.grad is not None
        assert not output.grad[past].any(), name
        last_but_keys = ".layers.1." in name and "k_proj" not in name and "v_proj" not in name
        assert bool(output.grad[~past].any()) != last_but_keys, name
