"""A transformers Trainer whose LoRA adapter lets go of each example at its boundary."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import kl_div, log_softmax
from transformers import Trainer

from lorazor.training.boundary_mask import BoundaryMask
from lorazor.training.finetune_batches import ByLength
from lorazor.training.finetune_config import FinetuneConfig
from lorazor.training.finetune_cuts import Cut, example_rng, log_uniform
from lorazor.training.finetune_data import Batch, boundaries, positions, target_tokens
from lorazor.training.finetune_model import compile_layers
from lorazor.training.finetune_own import OwnOutputs
from lorazor.training.target_logits import TargetLogits, chunks, token_losses, wanted

# Not cuDNN's: on an H100 or H200 its backward pass makes NaN of a batch of padded rows whose width is 64 more than a
# multiple of 128 (pytorch/pytorch#196678).
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
JUDGED = (Cut.NEVER, Cut.PROMPT)  # validation is done with each


class FinetuneTrainer(Trainer):
    """Trains under `config.cuts`; validation gives loss and exact share of the unreleased and of the prompt-only path.

    The mask is set before a forward pass and stays until after its backward pass, so gradient checkpointing computes
    the same again. That is also why distillation runs its three paths as rows of one batch.
    """

    control: Any

    def __init__(self, config: FinetuneConfig, own: OwnOutputs | None, **options: Any) -> None:
        super().__init__(**options)
        self.config, self.own = config, own
        self.boundary, self.targets = BoundaryMask(self.model), TargetLogits(self.model)
        if config.compile:
            compile_layers(self.model)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's, with attention whose gradients are right."""
        with sdpa_kernel(ATTENTION):
            return super().train(*args, **kwargs)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Trainer's own grouping by length wants examples that are mappings."""
        if not self.config.group_by_length:
            return super()._get_train_sampler(train_dataset)
        examples = self.train_dataset if train_dataset is None else train_dataset
        lengths = [len(example.prompt) + len(example.target) for example in examples]
        return ByLength(self.config.batch * self.config.accumulate, lengths, self.config.seed)

    def compute_loss(
        self, model: Any, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Tensor | None = None
    ) -> Any:
        """Cross entropy on the targets, and with `distill` the divergence of two released paths from the full one."""
        labels, releases = inputs["labels"], self.draw(inputs)
        rows = sandwich(inputs, releases) if self.config.distill else (inputs, releases)
        outputs = model(**self.masked(*rows))
        targets = labels[:, 1:][wanted(labels)]
        full, *released = outputs.logits.split(len(targets))
        loss = token_losses(full, targets).sum()
        if released:
            loss = loss + self.config.distill * divergence(full, *released)
        # Trainer averages gradients over processes, but the number that it gives counts the tokens of all of them.
        items = len(targets) if num_items_in_batch is None else num_items_in_batch / self.accelerator.num_processes
        return (loss / items, outputs) if return_outputs else loss / items

    def draw(self, batch: Batch) -> Tensor:
        """This step's release step of each example, int64 [batch]; with distillation log-uniform."""
        lengths, step = target_tokens(batch["labels"]).tolist(), self.state.global_step
        rngs = [example_rng(self.config.seed, step, index) for index in batch["index"].tolist()]
        draw = log_uniform if self.config.distill else self.config.cuts.draw
        return torch.tensor(list(map(draw, lengths, rngs)), device=batch["labels"].device)

    def masked(self, batch: Batch, releases: Tensor) -> dict[str, Any]:
        """Set the mask for the next pass over `batch`, which gives the targets' logits; what the model takes of it."""
        places = positions(batch["attention_mask"])
        self.boundary.set(places, boundaries(batch, releases))
        self.targets.set(batch["labels"])
        rows = {key: batch[key] for key in ("input_ids", "attention_mask")}
        return {**rows, "position_ids": places, "use_cache": False}

    def get_batch_samples(self, epoch_iterator: Iterator[Batch], num_batches: int, device: Any) -> Any:
        """The batches of one optimizer step, in the adapter's own words when it is their turn."""
        share, step = self.config.own_outputs, self.state.global_step
        if self.own is not None and Random(f"{self.config.seed}/{step}/own").random() < share:
            own = self.own
            with self.compute_loss_context_manager():
                self.boundary.clear()
                self.targets.clear()
                epoch_iterator = (own.replace(self.model, batch, step) for batch in epoch_iterator)
                return super().get_batch_samples(epoch_iterator, num_batches, device)
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    @torch.no_grad()
    def evaluate(self, *_: Any, metric_key_prefix: str = "eval", **__: Any) -> dict[str, float]:
        """Loss per target token and share of targets that greedy decoding would give exactly, under each cut."""
        self.model.eval()
        sums = {cut: torch.zeros(4, dtype=torch.float64) for cut in JUDGED}
        for batch in self.get_eval_dataloader():
            batch = self._prepare_inputs(batch)
            for cut in JUDGED:
                sums[cut] += self.accelerator.gather_for_metrics(self._judge(batch, cut)).double().sum(0).cpu()
        metrics = {}
        for cut, (loss, tokens, exact, rows) in sums.items():
            metrics[f"{metric_key_prefix}_{cut}_loss"] = float(loss / tokens)
            metrics[f"{metric_key_prefix}_{cut}_exact"] = float(exact / rows)
        for kind in ("loss", "exact"):
            both = [metrics[f"{metric_key_prefix}_{cut}_{kind}"] for cut in self.judged_by]
            metrics[f"{metric_key_prefix}_{kind}"] = sum(both) / len(both)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    @property
    def judged_by(self) -> tuple[Cut, ...]:
        """The paths whose mean chooses the best checkpoint: those that this training is for."""
        return JUDGED if self.config.cut is Cut.RELEASE_AWARE else (self.config.cut,)

    def _judge(self, batch: Batch, cut: Cut) -> Tensor:
        """float32 [batch, 4]: summed loss, target tokens, whether every argmax is right, and 1."""
        lengths = target_tokens(batch["labels"])
        releases = lengths if cut is Cut.NEVER else torch.ones_like(lengths)
        with self.compute_loss_context_manager():
            logits = self.model(**self.masked(batch, releases)).logits
        at = wanted(batch["labels"])
        row, labels = at.nonzero()[:, 0], batch["labels"][:, 1:][at]
        zeros = torch.zeros(len(lengths), device=logits.device)
        loss = zeros.index_add(0, row, token_losses(logits, labels))
        wrong = zeros.index_add(0, row, (logits.argmax(-1) != labels).float())
        return torch.stack([loss, lengths.float(), (wrong == 0).float(), torch.ones_like(loss)], 1)


def sandwich(batch: Batch, releases: Tensor) -> tuple[Batch, Tensor]:
    """Every example three times: never released, released after the prompt, and released at `releases`."""
    rows = {key: value.repeat(3, *[1] * (value.dim() - 1)) for key, value in batch.items()}
    return rows, torch.cat([target_tokens(batch["labels"]), torch.ones_like(releases), releases])


def divergence(full: Tensor, *released: Tensor) -> Tensor:
    """KL(full ‖ released), summed over the rows of logits [n, V], the mean over `released`; no gradient into `full`."""
    total = torch.zeros((), device=full.device)
    for logits in released:
        for student, teacher in zip(chunks(logits), chunks(full.detach()), strict=True):
            student, teacher = log_softmax(student.float(), -1), log_softmax(teacher.float(), -1)
            total = total + kl_div(student, teacher, reduction="sum", log_target=True)
    return total / len(released)
