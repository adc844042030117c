"""Logits of target tokens alone: the same numbers and gradients as from all of them, whatever the chunks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

from lorazor.training import target_logits
from lorazor.training.finetune_data import IGNORED
from lorazor.training.target_logits import TargetLogits, token_losses, wanted


class Headed(nn.Module):
    """As much of a causal language model as has a head."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 7)

    def get_output_embeddings(self) -> nn.Module:
        """As transformers' models."""
        return self.head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits."""
        logits: torch.Tensor = self.head(hidden)
        return logits


label_rows = st.lists(st.lists(st.sampled_from([IGNORED, 0, 3, 6]), min_size=5, max_size=5), min_size=1, max_size=4)


@given(label_rows)
def test_they_are_the_logits_from_which_targets_are_predicted(rows: list[list[int]]) -> None:
    """Row by row those at the place before each target; all of them again once cleared."""
    model, labels = Headed(), torch.tensor(rows)
    hidden = torch.randn(*labels.shape, 4)
    every = model(hidden)
    targets = TargetLogits(model)
    targets.set(labels)
    places = [(i, j - 1) for i, row in enumerate(rows) for j, label in enumerate(row) if j and label != IGNORED]
    expected = torch.stack([every[place] for place in places]) if places else every.new_zeros(0, 7)
    torch.testing.assert_close(model(hidden), expected)
    targets.clear()
    assert torch.equal(model(hidden), every)


def test_chunks_change_neither_losses_nor_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight tokens in chunks of three, against torch's cross entropy of all at once."""
    monkeypatch.setattr(target_logits, "CHUNK", 3)
    logits, labels = torch.randn(8, 7, requires_grad=True), torch.arange(8) % 7
    losses = token_losses(logits, labels)
    torch.testing.assert_close(losses, cross_entropy(logits, labels, reduction="none"))
    (got,) = torch.autograd.grad(losses.sum(), logits)
    (expected,) = torch.autograd.grad(cross_entropy(logits, labels, reduction="sum"), logits)
    torch.testing.assert_close(got, expected)


def test_the_model_never_makes_the_other_logits() -> None:
    """A batch of one target makes one row of logits, however long it is."""
    model, labels, made = Headed(), torch.full((3, 50), IGNORED), []
    labels[1, 20] = 2
    model.head.register_forward_hook(lambda _module, _inputs, output: made.append(output.shape))
    TargetLogits(model).set(labels)
    model(torch.randn(3, 50, 4))
    assert made == [(1, 7)]
    assert wanted(labels).sum() == 1
