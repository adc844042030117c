"""Release steps drawn from a distribution, for a bench without a policy (dummy weights have nothing to learn from)."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from lorazor.features.errors import InputError

DEFAULT = "uniform:1:0.35"
DEFAULT_NEVER = 0.15
FORMS = "uniform:LOW:SHARE (from step LOW to SHARE of the output tokens) or fixed:STEP"


@dataclass(frozen=True)
class ReleaseSteps:
    """Uniform on [low, share * output tokens]; or `low` itself where share is None. `never`: share of requests."""

    low: int
    share: float | None
    never: float

    def draw(self, random: Random, output_tokens: int) -> int | None:
        """The release step of one request; None: it keeps its adapter."""
        # Both are drawn every time, so that another `never` moves no other request's step.
        stays, place = random.random(), random.random()
        if stays < self.never:
            return None
        high = self.low if self.share is None else max(self.low, int(self.share * output_tokens))
        return self.low + int(place * (high - self.low + 1))

    def __str__(self) -> str:
        """A sentence for the page."""
        where = f"step {self.low}" if self.share is None else f"a step uniform on [{self.low}, {self.share:g} L]"
        return f"{self.never:.0%} of the requests never release, the others at {where}, L = output tokens"


def parse_steps(text: str, never: float) -> ReleaseSteps:
    """Read `--release-steps` and `--never`.

    Raises:
        InputError: another form, or a value outside its rule.
    """
    if not 0 <= never <= 1:
        raise InputError(f"--never must be a share from 0 to 1, got {never:g}")
    kind, *values = text.split(":")
    try:
        if kind == "fixed" and len(values) == 1:
            low, share = int(values[0]), None
        elif kind == "uniform" and len(values) == 2:
            low, share = int(values[0]), float(values[1])
        else:
            raise ValueError
    except ValueError:
        raise InputError(f"--release-steps must be {FORMS}, got {text!r}") from None
    if low < 1 or (share is not None and not 0 < share <= 1):
        raise InputError(f"--release-steps: a step is at least 1 and a share in (0, 1], got {text!r}")
    return ReleaseSteps(low, share, never)
