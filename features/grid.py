"""Decision steps, release steps and the boundary: the arithmetic that every other part agrees on.

A decision at admission is written c = 0 and gives r = 1; a decision at decode step c gives r = c + 2, because with
asynchronous scheduling the step after c is already on its way when the decision arrives.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def is_decision_step(c: int, probe_interval: int) -> bool:
    """Whether decode step `c` (output tokens before it) is probed and may decide: c = 1 and the multiples of g."""
    return c == 1 or (c > 0 and c % probe_interval == 0)


def is_decision_step_of_each(c: NDArray[np.integer[Any]], probe_interval: int) -> NDArray[np.bool_]:
    """`is_decision_step` of an array of decode steps."""
    found: NDArray[np.bool_] = (c == 1) | ((c > 0) & (c % probe_interval == 0))
    return found


def release_step(c: int) -> int:
    """The release step r that a decision at step `c` gives; c = 0 stands for admission."""
    return 1 if c == 0 else c + 2


def boundary(prompt_tokens: int, release: int) -> int:
    """The first position that runs without the adapter: a token at position p uses it if and only if p < boundary."""
    return prompt_tokens + release - 1


def decision_steps(length: int, probe_interval: int) -> list[int]:
    """Ascending c (0 = admission) whose release step lies below `length`, the never-released output length."""
    return [c for c in range(length) if (c == 0 or is_decision_step(c, probe_interval)) and release_step(c) < length]


def release_grid(length: int, probe_interval: int) -> list[int]:
    """The release steps below `length` at which rollouts exist: {1, 3, g + 2, 2g + 2, …}."""
    return [release_step(c) for c in decision_steps(length, probe_interval)]
