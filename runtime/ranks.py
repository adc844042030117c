"""What the ranks of a tensor-parallel engine must agree on before a step: see `core.py`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from vllm.distributed import get_tp_group

from lorazor.runtime.core import ReleaseCore
from lorazor.runtime.step_news import StepNews


def agree_on_admissions(core: ReleaseCore, ids: Sequence[str]) -> None:
    """Take in what the deciding rank says of these new requests. Every rank calls it in the same steps."""
    group: Any = get_tp_group()
    if group.world_size > 1:
        core.take_in_admissions(group.broadcast_object(core.admissions(ids) if core.decides else None))


def take_in_decisions(core: ReleaseCore, scheduler_output: Any) -> Collection[str]:
    """Take in what the scheduler was told since its last step; the requests that were released."""
    # vLLM's warm-up makes steps without its scheduler.
    news: StepNews | None = getattr(scheduler_output, "lorazor", None)
    if news is None:
        return ()
    core.take_in(news.released, news.given_up)
    return news.released.keys()
