"""Defaults of `lorazor serve` where those of `vllm serve` would not start, or would serve one adapter at a time.

Only what the user left open is set, and each setting is said in a line: the same command with plain `vllm serve` can be
written down from them.
"""

import os
from argparse import Namespace
from collections.abc import Iterator

# LoRAConfig.max_lora_rank takes these values only.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
STOCK_RANK, STOCK_LORAS = 16, 1
# More slots cost memory and, in stock kernels, time; a user with more adapters in flight sets --max-loras.
MOST_LORAS = 8
# Above this, vLLM's own choice of cores (it knows about NUMA nodes) is the better one.
FEW_CORES = 4
KV_CACHE_BYTES = 4 << 30
# The part of the free host memory that adapters outside the slots may fill.
HOST_SHARE = 4


def set_defaults(args: Namespace, adapters: int, rank: int, size: int = 0) -> Iterator[str]:
    """Complete `args` in place; yield a line for each setting that is not vLLM's own.

    Args:
        adapters: how many adapters are served from the start.
        rank: their largest LoRA rank, 0 if unknown.
        size: bytes of the largest one, 0 if unknown.
    """
    from vllm.platforms import current_platform

    yield from _lora_defaults(args, adapters, rank)
    yield from _host_defaults(args, adapters, size)
    if current_platform.is_cpu():
        yield from _cpu_defaults(args)


def _lora_defaults(args: Namespace, adapters: int, rank: int) -> Iterator[str]:
    if adapters and not args.enable_lora:
        args.enable_lora = True
        yield "set --enable-lora, since there are --lora-modules"
    if args.max_loras is None:
        args.max_loras = min(max(adapters, STOCK_LORAS), MOST_LORAS)
        if args.max_loras != STOCK_LORAS:
            yield f"set --max-loras {args.max_loras}, for {adapters} adapters"
    if args.max_lora_rank is None:
        args.max_lora_rank = next((r for r in RANKS if r >= max(rank, STOCK_RANK)), RANKS[-1])
        if args.max_lora_rank != STOCK_RANK:
            yield f"set --max-lora-rank {args.max_lora_rank}, for an adapter of rank {rank}"


def _host_defaults(args: Namespace, adapters: int, size: int) -> Iterator[str]:
    """Keep what leaves its slot on the host: by default vLLM reads it from disk again."""
    if args.max_cpu_loras is not None or adapters <= args.max_loras:
        return
    fitting = _available_memory() // HOST_SHARE // (size * args.tensor_parallel_size) if size else adapters
    if fitting > args.max_loras:
        args.max_cpu_loras = min(adapters, fitting)
        yield f"set --max-cpu-loras {args.max_cpu_loras}, for {adapters} adapters on {args.max_loras} slots"


def _cpu_defaults(args: Namespace) -> Iterator[str]:
    if args.dtype == "auto":
        args.dtype = "float32"
        yield "set --dtype float32: bfloat16 is three times slower on most CPUs"
    if args.kv_cache_memory_bytes is None and not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        # vLLM would take most of the machine's memory, as if it were a GPU's.
        args.kv_cache_memory_bytes = min(KV_CACHE_BYTES, _available_memory() // 4)
        yield f"set --kv-cache-memory-bytes {args.kv_cache_memory_bytes}"
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    one_worker = args.tensor_parallel_size * args.data_parallel_size == 1
    if "VLLM_CPU_OMP_THREADS_BIND" not in os.environ and 0 < len(cores) <= FEW_CORES and one_worker:
        # vLLM keeps a core free for the scheduler: on a small machine that is half of it.
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        yield f"set VLLM_CPU_OMP_THREADS_BIND={os.environ['VLLM_CPU_OMP_THREADS_BIND']}, all cores of this machine"


def _available_memory() -> int:
    import psutil  # type: ignore[import-untyped]  # vLLM brings it, without types

    return int(psutil.virtual_memory().available)
