"""One vLLM engine in a process of its own, driven line by line, so that several engines can take turns on one GPU.

Standard input: a line of JSON, {"engine": options of vllm.LLM, "adapters": {name: folder}}; then a line for each job.
Each answer is a line of JSON behind `>>> `; the first says that the engine runs. Two kinds of jobs:

    {"asks": [{"prompt": token ids, "adapter": name or null}], "tokens": number, "group": requests at a time,
     "texts": whether to answer with them}
    {"asks": [{"prompt", "adapter", "tokens": number, "release": step, "never" or missing}], "first": n, "last": m}
        all requests at once; counted are the output tokens from the end of the n-th request until m are left
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def request_of(names: dict[str, str], name: str | None) -> Any:
    """The LoRARequest of an adapter by its name."""
    from vllm.lora.request import LoRARequest

    return None if name is None else LoRARequest(name, 1 + list(names).index(name), names[name])


def run(llm: Any, names: dict[str, str], job: dict[str, Any]) -> dict[str, Any]:
    """Generate greedily to a fixed length, `group` requests at a time; seconds are of the generation alone."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0, max_tokens=job["tokens"], ignore_eos=job.get("ignore_eos", True), detokenize=False
    )
    seconds, texts = 0.0, []
    asks = job["asks"]
    for first in range(0, len(asks), job["group"]):
        some = asks[first : first + job["group"]]
        prompts = [{"prompt_token_ids": ask["prompt"]} for ask in some]
        loras = [request_of(names, ask["adapter"]) for ask in some]
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, lora_request=loras, use_tqdm=False)
        seconds += time.perf_counter() - start
        texts += [list(output.outputs[0].token_ids) for output in outputs]
    count = sum(map(len, texts))
    return {"seconds": seconds, "tokens": count, "texts": texts if job.get("texts") else None}


def queue(engine: Any, names: dict[str, str], asks: list[dict[str, Any]], prefix: str) -> list[str]:
    """Add requests of fixed length to vLLM's engine, greedy, a token at a time; their ids."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    ids = [f"{prefix}-{k}" for k in range(len(asks))]
    for request_id, ask in zip(ids, asks, strict=True):
        params = SamplingParams(
            temperature=0.0,
            max_tokens=ask["tokens"],
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={"lorazor_release": ask["release"]} if "release" in ask else None,
        )
        prompt = {"prompt_token_ids": ask["prompt"]}
        engine.add_request(request_id, prompt, params, lora_request=request_of(names, ask["adapter"]))
    return ids


def count(llm: Any, names: dict[str, str], job: dict[str, Any], number: int) -> dict[str, Any]:
    """Tokens and seconds between the ends of two requests (see above)."""
    engine, asks = llm.llm_engine, job["asks"]
    begun, tokens, ended = time.perf_counter(), 0, 0
    queue(engine, names, asks, str(number))
    answer: dict[str, Any] | None = None
    while engine.has_unfinished_requests():
        outputs = engine.step()
        before = ended
        ended += sum(output.finished for output in outputs)
        tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
        if before < job["first"] <= ended:
            begun, tokens = time.perf_counter(), 0
        if answer is None and ended >= len(asks) - job["last"]:
            answer = {"seconds": time.perf_counter() - begun, "tokens": tokens}
    assert answer is not None
    return answer


def main() -> None:
    """Start the engine, load every adapter once, then do the jobs as they come."""
    from vllm import LLM

    settings = json.loads(sys.stdin.readline())
    names = settings["adapters"]
    start = time.perf_counter()
    llm = LLM(**settings["engine"])
    for name in names:
        llm.llm_engine.add_lora(request_of(names, name))
    print(">>> " + json.dumps({"started": time.perf_counter() - start}), flush=True)
    for number, line in enumerate(sys.stdin):
        job = json.loads(line)
        answer = count(llm, names, job, number) if "first" in job else run(llm, names, job)
        print(">>> " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
