"""Room for shadow rows (see shadow.py): the worker is built for more rows and tokens than the scheduler may use, and
for scratch blocks that the scheduler does not know of.

Only where a policy with probes is loaded on model runner V2. What users set, and what they see, stays theirs: the rows
that run at once, the tokens of a step, and the number of KV blocks but for the few that the scratch blocks take.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

# A step in which more rows are due is probed over the whole batch. Twice the rows cost far less than a second pass.
MOST_SHADOWS = 128
# In additional_config, so that it reaches every process, and that a config prepared twice is widened once.
KEY = "lorazor_shadow_rows"


def shadow_rows(vllm_config: Any) -> int:
    """How many rows of each step are kept free for shadows."""
    additional = vllm_config.additional_config
    return int(additional.get(KEY, 0)) if isinstance(additional, dict) else 0


def make_room(vllm_config: Any, policy: str) -> None:
    """Widen the engine by the shadows' rows, by none if the policy has no probes; the scheduler takes them off again
    (`leave_room`).

    Raises:
        InputError: the policy cannot be read.
    """
    from lorazor.policy.artifact import read_manifest

    if not getattr(vllm_config, "use_v2_model_runner", False) or KEY in vllm_config.additional_config:
        return
    scheduler, graphs = vllm_config.scheduler_config, vllm_config.compilation_config
    most = scheduler.max_num_seqs
    rows = min(most, MOST_SHADOWS) if read_manifest(policy).probes else 0
    vllm_config.additional_config = {**vllm_config.additional_config, KEY: rows}
    scheduler.max_num_seqs += rows
    scheduler.max_num_batched_tokens += rows
    largest = max(graphs.cudagraph_capture_sizes or [0])
    if most <= largest < most + rows:
        # A full batch ran in a graph, so it must do with its shadows.
        sizes = {*graphs.cudagraph_capture_sizes, *range(largest + 8, most + rows, 8), most + rows}
        graphs.cudagraph_capture_sizes = sorted(sizes)
        graphs.max_cudagraph_capture_size = most + rows


def leave_room(scheduler: Any) -> None:
    """Hold a built scheduler to the rows and tokens that the user set."""
    rows, config = shadow_rows(scheduler.vllm_config), scheduler.scheduler_config
    if rows:
        scheduler.max_num_running_reqs = config.max_num_seqs - rows
        tokens = config.max_num_batched_tokens - rows
        scheduler.max_num_scheduled_tokens = min(scheduler.max_num_scheduled_tokens, tokens)


def scratch_bytes(specs: dict[str, Any], rows: int) -> int:
    """What `rows` blocks of every layer take; `specs` is the worker's KV cache specification by layer."""
    return rows * sum(int(spec.page_size_bytes) for spec in specs.values())


def with_scratch(kv_cache_config: Any, rows: int) -> Any:
    """A copy of the KV cache's configuration with `rows` blocks more, behind those that the scheduler gives out."""
    grown, blocks = deepcopy(kv_cache_config), kv_cache_config.num_blocks
    grown.num_blocks = blocks + rows
    for tensor in grown.kv_cache_tensors:
        tensor.size = tensor.size // blocks * (blocks + rows)
    return grown
