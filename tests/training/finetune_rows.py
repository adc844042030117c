"""Rows for fine-tuning tests: a made-up word, to be said in capitals."""

import json
from pathlib import Path
from random import Random


def write_rows(path: Path, count: int, seed: int = 0) -> Path:
    """`count` rows with distinct prompts, some as a prompt and some as a chat."""
    rng, words = Random(seed), dict[str, None]()
    while len(words) < count:
        words["".join(rng.choice("abcd") for _ in range(rng.randint(2, 7)))] = None
    rows = [
        {"prompt": f"up {word}=", "reference": word.upper()}
        if number % 2
        else {"messages": [{"role": "user", "content": f"up {word}="}], "target": word.upper(), "reference": "?"}
        for number, word in enumerate(words)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
