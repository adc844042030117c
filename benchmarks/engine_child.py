"""One vLLM engine in a process of its own, driven line by line, so that two engines can take turns on one GPU.

Standard input: a line of JSON, {"engine": options of vllm.LLM, "adapters": {name: folder}}; then a line for each job,
{"asks": [{"prompt": token ids, "adapter": name or null}], "tokens": number, "group": requests at a time,
"texts": whether to answer with them}. Each answer is a line of JSON behind `>>> `; the first says that the engine runs.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def run(llm: Any, names: dict[str, str], job: dict[str, Any]) -> dict[str, Any]:
    """Generate greedily to a fixed length, `group` requests at a time; seconds are of the generation alone."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    numbers = {name: k + 1 for k, name in enumerate(names)}
    params = SamplingParams(
        temperature=0.0, max_tokens=job["tokens"], ignore_eos=job.get("ignore_eos", True), detokenize=False
    )
    seconds, texts = 0.0, []
    asks = job["asks"]
    for first in range(0, len(asks), job["group"]):
        some = asks[first : first + job["group"]]
        prompts = [{"prompt_token_ids": ask["prompt"]} for ask in some]
        loras = [
            LoRARequest(ask["adapter"], numbers[ask["adapter"]], names[ask["adapter"]]) if ask["adapter"] else None
            for ask in some
        ]
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, lora_request=loras, use_tqdm=False)
        seconds += time.perf_counter() - start
        texts += [list(output.outputs[0].token_ids) for output in outputs]
    count = sum(map(len, texts))
    return {"seconds": seconds, "tokens": count, "texts": texts if job.get("texts") else None}


def main() -> None:
    """Start the engine, then do the jobs as they come."""
    from vllm import LLM

    settings = json.loads(sys.stdin.readline())
    start = time.perf_counter()
    llm = LLM(**settings["engine"])
    print(">>> " + json.dumps({"started": time.perf_counter() - start}), flush=True)
    for line in sys.stdin:
        print(">>> " + json.dumps(run(llm, settings["adapters"], json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
