"""The trainer's losses and gradients: against stock PEFT training, accumulation, checkpointing, distillation."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax
from transformers import Trainer

from lorazor.training.finetune import make_trainer
from lorazor.training.finetune_batches import ByLength
from lorazor.training.finetune_config import FinetuneConfig, finetune_config
from lorazor.training.finetune_data import IGNORED, Batch, Examples, collate, load_examples
from lorazor.training.finetune_model import load_lora, load_tokenizer
from lorazor.training.finetune_trainer import FinetuneTrainer
from tests.runtime.tiny import Tiny, make_tiny
from tests.training.finetune_rows import write_rows

pytestmark = pytest.mark.usefixtures("one_thread")
PAD = 2


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A tiny random Llama and its rows in upper.jsonl."""
    folder = tmp_path_factory.mktemp("base")
    write_rows(folder / "upper.jsonl", 24)
    return make_tiny(folder, {})


def configured(base: Tiny, **options: Any) -> FinetuneConfig:
    """A short run on the fixture's model and rows."""
    data = Path(base.base).parent / "upper.jsonl"
    return finetune_config(
        **{"model": base.base, "data": [data], "validation_share": 0, "rank": 4, "batch": 8, "steps": 3, **options}
    )


def examples_of(config: FinetuneConfig) -> Examples:
    """The tokenised rows."""
    return load_examples(config, load_tokenizer(config.model), 512)


def trainer_of(config: FinetuneConfig, folder: Path, strong: bool = True) -> FinetuneTrainer:
    """A trainer; `strong`: its adapter is not zero as a new one, so that every weight has a gradient."""
    model = load_lora(config)
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if strong and "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    return make_trainer(config, examples_of(config), model, load_tokenizer(config.model), folder)


def gradients(trainer: FinetuneTrainer, sizes: list[int]) -> dict[str, Tensor]:
    """The gradients of one optimizer step over the first examples, in micro-batches of these sizes."""
    examples, batches = iter(trainer.train_dataset), []
    for size in sizes:
        batches.append(collate([next(examples) for _ in range(size)], PAD))
    items = torch.stack([(batch["labels"] != IGNORED).sum() for batch in batches]).sum()
    trainer.model.zero_grad()
    for batch in batches:
        trainer.training_step(trainer.model, batch, items)
    return {name: weight.grad for name, weight in trainer.model.named_parameters() if weight.grad is not None}


def whole_pass(trainer: FinetuneTrainer, batch: Batch, releases: Tensor) -> Any:
    """The model's own loss and all of its logits."""
    rows = trainer.masked(batch, releases)
    trainer.targets.clear()
    return trainer.model(**rows, labels=batch["labels"])


def assert_same_gradients(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """All close, and none of them zero."""
    assert a.keys() == b.keys()
    for name, grad in a.items():
        assert grad.abs().max() > 1e-7, name
        torch.testing.assert_close(grad, b[name], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("distill", [0.0, 0.5])
def test_accumulation_changes_nothing(base: Tiny, tmp_path: Path, distill: float) -> None:
    """One batch of 8 and three micro-batches of it give the same cuts and the same gradients."""
    trainer = trainer_of(configured(base, distill=distill), tmp_path)
    assert_same_gradients(gradients(trainer, [8]), gradients(trainer, [4, 3, 1]))


@pytest.mark.parametrize("distill", [0.0, 0.5])
def test_gradient_checkpointing_computes_the_same_mask_again(base: Tiny, tmp_path: Path, distill: float) -> None:
    """Gradients with and without recomputation agree, and recomputation did happen."""
    plain = gradients(trainer_of(configured(base, distill=distill), tmp_path), [8])
    trainer = trainer_of(configured(base, distill=distill, gradient_checkpointing=True), tmp_path)
    calls = []
    layer = trainer.model.get_submodule("base_model.model.model.layers.1.self_attn")
    layer.register_forward_hook(lambda *_: calls.append(1))
    assert_same_gradients(plain, gradients(trainer, [8]))
    assert len(calls) == 2


@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_layers_give_the_same_gradients(base: Tiny, tmp_path: Path, checkpointing: bool) -> None:
    """For batches of several shapes, and all layers and shapes share their compiled code."""
    options = {"gradient_checkpointing": checkpointing}
    plain = trainer_of(configured(base, **options), tmp_path)
    trainer = trainer_of(configured(base, compile=True, **options), tmp_path)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for sizes in ([8], [5, 3], [4, 2]):
        assert_same_gradients(gradients(plain, sizes), gradients(trainer, sizes))
    # One for the first layer where its input has no gradient, one for all others.
    assert 1 <= torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def has_cudnn_attention() -> bool:
    """Whether scaled_dot_product_attention may take cuDNN's."""
    return bool(torch.backends.cuda.cudnn_sdp_enabled())  # type: ignore[no-untyped-call]


def test_cudnns_attention_is_off_while_it_trains(base: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backward pass makes NaN for some widths (pytorch/pytorch#196678); afterwards the caller has it back."""
    trainer, seen = trainer_of(configured(base), tmp_path), list[bool]()
    loss = trainer.compute_loss

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append(has_cudnn_attention())
        return loss(*args, **kwargs)

    monkeypatch.setattr(trainer, "compute_loss", spy)
    before = has_cudnn_attention()
    trainer.train()
    assert seen == [False] * 3
    assert has_cudnn_attention() == before


def test_cut_never_is_ordinary_training_bit_for_bit(base: Tiny, tmp_path: Path) -> None:
    """After three steps the weights equal those of stock transformers + PEFT, which knows nothing of a mask."""
    config = configured(base, cut="never", lr=0.01)
    ours = trainer_of(config, tmp_path, strong=False)
    stock = Trainer(
        model=load_lora(config),
        args=ours.args,
        train_dataset=examples_of(config).train,
        data_collator=lambda rows: {k: v for k, v in collate(rows, PAD).items() if k != "index"},
    )
    before = {name: weight.clone() for name, weight in stock.model.named_parameters()}
    ours.train()
    stock.train()
    for (name, a), b in zip(ours.model.named_parameters(), stock.model.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert torch.equal(a, before[name]) != ("lora_" in name), name


def test_distillation_is_cross_entropy_and_the_divergence_of_two_released_paths(base: Tiny, tmp_path: Path) -> None:
    """The loss equals one put together from three passes, and the full path takes no gradient from the divergence."""
    trainer = trainer_of(configured(base, distill=0.5), tmp_path)
    batch = collate(trainer.train_dataset[:6], PAD)
    lengths = (batch["labels"] != IGNORED).sum(1)
    wanted = batch["labels"][:, 1:] != IGNORED
    with torch.no_grad():
        full = whole_pass(trainer, batch, lengths)
        teacher = log_softmax(full.logits[:, :-1][wanted], -1)
        expected = full.loss
        for releases in (torch.ones_like(lengths), trainer.draw(batch)):
            student = log_softmax(whole_pass(trainer, batch, releases).logits[:, :-1][wanted], -1)
            expected = expected + 0.25 * kl_div(student, teacher, log_target=True, reduction="sum") / wanted.sum()
        got = trainer.compute_loss(trainer.model, batch)
    torch.testing.assert_close(got, expected)
    assert got > full.loss + 1e-3


def test_own_outputs_are_what_the_adapter_says(base: Tiny, tmp_path: Path) -> None:
    """Targets become the greedy continuation without a cut; they are kept until the refresh, and then said anew."""
    trainer = trainer_of(configured(base, own_outputs=1.0, refresh=10), tmp_path)
    assert trainer.own is not None
    batch = collate(trainer.train_dataset[:4], PAD)
    trainer.boundary.clear()
    replaced = trainer.own.replace(trainer.model, batch, 0)
    for row in range(4):
        tokens, labels = replaced["input_ids"][row], replaced["labels"][row]
        first = int((labels != IGNORED).nonzero()[0])
        assert tuple(tokens[:first].tolist()) == trainer.train_dataset[row].prompt
        with torch.no_grad():
            said = trainer.model(tokens[None]).logits[0].argmax(-1)
        own = labels != IGNORED
        assert torch.equal(said[:-1][own[1:]], labels[1:][own[1:]])
    with torch.no_grad():
        for name, weight in trainer.model.named_parameters():
            if "lora_B" in name:
                weight.mul_(-3)
    kept, anew = (trainer.own.replace(trainer.model, batch, step)["input_ids"] for step in (9, 10))
    assert torch.equal(kept, replaced["input_ids"])
    assert not torch.equal(kept, anew)
    trainer.train()
    assert trainer.state.global_step == 3


def test_validation_judges_the_unreleased_and_the_prompt_only_path(base: Tiny, tmp_path: Path) -> None:
    """Losses per token and exact shares equal those of single passes; the choice is by the mean of both."""
    config = configured(base, validation_share=0.5, batch=5)
    trainer = trainer_of(config, tmp_path)
    metrics = trainer.evaluate()
    for cut in ("never", "prompt"):
        losses, tokens, exact = 0.0, 0, 0
        for example in trainer.eval_dataset:
            batch: Batch = collate([example], PAD)
            length = (batch["labels"] != IGNORED).sum(1)
            with torch.no_grad():
                result = whole_pass(trainer, batch, length if cut == "never" else torch.ones_like(length))
            losses, tokens = losses + float(result.loss) * int(length), tokens + int(length)
            exact += bool((result.logits[0, :-1].argmax(-1) == batch["labels"][0, 1:])[-int(length) :].all())
        assert metrics[f"eval_{cut}_loss"] == pytest.approx(losses / tokens, rel=1e-5)
        assert metrics[f"eval_{cut}_exact"] == pytest.approx(exact / len(trainer.eval_dataset))
    assert metrics["eval_never_loss"] != pytest.approx(metrics["eval_prompt_loss"], rel=1e-3)
    assert metrics["eval_loss"] == pytest.approx((metrics["eval_never_loss"] + metrics["eval_prompt_loss"]) / 2)


@pytest.mark.parametrize("n", [1, 5, 8, 1601])
def test_batches_of_like_length_come_in_no_order(n: int) -> None:
    """Every example once, the longest at the beginning; lengths of batches rise as often as they fall."""
    lengths = torch.randperm(n, generator=torch.Generator().manual_seed(3)).tolist()
    sampler = ByLength(8, lengths, seed=0)
    indices = list(sampler)
    assert sorted(indices) == list(range(n))
    assert n - 1 in [lengths[i] for i in indices[:8]]
    if n > 400:
        batches = [sorted(lengths[i] for i in indices[k : k + 8]) for k in range(8, n - 8, 8)]
        assert max(batch[-1] - batch[0] for batch in batches) < n / 10
        falls = [a[0] > b[0] for a, b in pairwise(batches)]
        assert 0.4 < sum(falls) / len(falls) < 0.6
    sampler.set_epoch(0)
    assert list(sampler) == indices
    sampler.set_epoch(1)
    assert n <= 8 or list(sampler) != indices


def test_grouping_by_length_pads_less_and_leaves_nobody_out(base: Tiny, tmp_path: Path) -> None:
    """An epoch holds every example once; the batches are narrower than in Trainer's own order."""
    padded = {}
    for grouped in (False, True):
        trainer = trainer_of(configured(base, batch=2, group_by_length=grouped), tmp_path / str(grouped))
        batches = list(trainer.get_train_dataloader())
        assert sorted(i for batch in batches for i in batch["index"].tolist()) == list(
            range(len(trainer.train_dataset))
        )
        padded[grouped] = sum(int((batch["attention_mask"] == 0).sum()) for batch in batches)
    assert padded[True] < padded[False]
