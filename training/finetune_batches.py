"""The order in which `lorazor finetune --group-by-length` takes its examples."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers.trainer_pt_utils import LengthGroupedSampler


class ByLength(LengthGroupedSampler):
    """Examples of like length together, in an order that follows from seed and epoch alone.

    transformers has fifty batches go from the longest to the shortest, again and again: training forgets the long ones
    on the short ones, and at the next long one the loss is five times as high. So here the batches are shuffled, but
    for the first, which has the longest example (too little memory shows at once), and a last one that is not full.
    """

    def __init__(self, batch_size: int, lengths: list[int], seed: int) -> None:
        super().__init__(batch_size, lengths=lengths)
        self._seed = seed
        self.set_epoch(0)

    def __iter__(self) -> Iterator[int]:
        """The indices of an epoch, batch after batch."""
        size, indices = self.batch_size, list(super().__iter__())
        batches, full = [indices[k : k + size] for k in range(0, len(indices), size)], len(indices) // size
        middle = batches[1:full]
        order = torch.randperm(len(middle), generator=self.generator).tolist()
        for batch in (*batches[:1], *(middle[k] for k in order), *batches[max(1, full) :]):
            yield from batch

    def set_epoch(self, epoch: int) -> None:
        """Called by Trainer before each epoch, also of a run that goes on."""
        self.generator = torch.Generator().manual_seed(self._seed + epoch)
