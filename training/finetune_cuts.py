"""Where an example lets its adapter go in training: its release step, and from it its boundary."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from random import Random


class Cut(StrEnum):
    """What `--cut` chooses."""

    NEVER = "never"  # ordinary LoRA training
    PROMPT = "prompt"  # always after the prompt, as PreFT does
    RELEASE_AWARE = "release-aware"  # drawn anew for each example in each step


@dataclass(frozen=True)
class Cuts:
    """How release steps are drawn; the shares are read by RELEASE_AWARE alone, and what they leave is never."""

    cut: Cut = Cut.RELEASE_AWARE
    prompt_share: float = 0.5
    uniform_share: float = 0.3

    def draw(self, target_tokens: int, rng: Random) -> int:
        """A release step r in 1..target_tokens; the last one is the same as never."""
        if self.cut is Cut.PROMPT:
            return 1
        if self.cut is Cut.NEVER:
            return target_tokens
        share = rng.random()
        if share < self.prompt_share:
            return 1
        return log_uniform(target_tokens, rng) if share < self.prompt_share + self.uniform_share else target_tokens


def log_uniform(most: int, rng: Random) -> int:
    """A whole number in 1..most with P(r <= k) = log(k + 1) / log(most + 1): early steps are the hard ones."""
    return min(most, int(math.exp(rng.random() * math.log(most + 1))))


def example_rng(seed: int, step: int, example: int) -> Random:
    """The draws of one example in one optimizer step.

    They depend on nothing else, so neither a resume nor the way a batch is split over devices and accumulation
    changes them.
    """
    return Random(f"{seed}/{step}/{example}")
