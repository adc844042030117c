"""From rows to padded batches: what a row may be, what is told about a bad one, and the split by prompt."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lorazor.features.errors import InputError
from lorazor.training.finetune_config import FinetuneConfig, finetune_config
from lorazor.training.finetune_data import IGNORED, Example, Examples, boundaries, collate, load_examples, positions

END = 1


class Letters:
    """A tokenizer of one token a character, with a special token before a plain prompt."""

    eos_token_id = END

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Code points."""
        return [0] * add_special_tokens + [ord(c) for c in text]

    def apply_chat_template(self, messages: list[Any], **_: Any) -> str:
        """The first message in brackets; one without content cannot be rendered."""
        return f"[{messages[0]['content'] + ''}]"


def load(path: Path, rows: list[Any], limit: int = 64, **options: Any) -> Examples:
    """The examples of these rows, nothing held out unless asked."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    config: FinetuneConfig = finetune_config(model=path.parent, data=[path], **{"validation_share": 0, **options})
    return load_examples(config, Letters(), limit)


def test_rows_are_asked_as_a_server_asks_and_end(tmp_path: Path) -> None:
    """A prompt keeps the tokenizer's special tokens, a chat its template's; target goes before reference."""
    chat = {"messages": [{"role": "user", "content": "a"}], "reference": "no", "target": "xy"}
    examples = load(tmp_path / "rows.jsonl", [{"prompt": "a", "reference": "x"}, chat])
    assert examples.train == [
        Example(0, (0, ord("a")), (ord("x"), END)),
        Example(1, (ord("["), ord("a"), ord("]")), (ord("x"), ord("y"), END)),
    ]
    assert examples.validation == []


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", "line 2: not JSON"),
        ([1], "line 2: a row must be an object, got list"),
        ({"reference": "x"}, 'line 2: give either "prompt" or "messages"'),
        ({"prompt": "a"}, 'line 2: "reference" must be a text that is not empty, got None'),
        ({"prompt": "a", "reference": " "}, "\"reference\" must be a text that is not empty, got ' '"),
        ({"prompt": "a", "reference": "x", "target": 3}, 'line 2: "target" must be a text that is not empty, got 3'),
        (
            {"prompt": "a" * 70, "reference": "x"},
            "line 2: a prompt of 71 tokens and a target of 2 must make at most 64",
        ),
        ({"messages": [{"role": "user", "content": None}], "reference": "x"}, "line 2: the base's chat template"),
    ],
)
def test_a_bad_row_is_told_with_its_line(tmp_path: Path, row: Any, words: str) -> None:
    """File, line, rule and value in one sentence."""
    with pytest.raises(InputError, match=r"rows\.jsonl, line 2") as told:
        load(tmp_path / "rows.jsonl", [{"prompt": "a", "reference": "x"}, row])
    assert words in str(told.value)
    assert "\n" not in str(told.value)


def test_an_empty_file_is_told(tmp_path: Path) -> None:
    """Nothing to train on."""
    with pytest.raises(InputError, match="holds no request"):
        load(tmp_path / "rows.jsonl", ["", ""])


def test_the_split_is_by_prompt_and_does_not_move(tmp_path: Path) -> None:
    """All targets of a prompt are on one side, in any order of the rows; a file for validation leaves all to train."""
    rows = [{"prompt": f"p{n // 2}", "reference": f"x{n}"} for n in range(40)]
    one = load(tmp_path / "one.jsonl", rows, validation_share=0.3)
    two = load(tmp_path / "two.jsonl", rows[::-1], validation_share=0.3)
    held = {example.prompt for example in one.validation}
    assert len(held) == 6
    assert len(one.validation) == 12
    assert not held & {example.prompt for example in one.train}
    assert held == {example.prompt for example in two.validation}
    assert one.digest() != two.digest()
    given = load(tmp_path / "three.jsonl", rows, validation=tmp_path / "one.jsonl", validation_share=0.3)
    assert (len(given.train), len(given.validation)) == (40, 40)
    with pytest.raises(InputError, match="1 distinct prompts are too few"):
        load(tmp_path / "four.jsonl", rows[:2], validation_share=0.3)


def test_a_batch_knows_its_positions_and_boundaries() -> None:
    """Padding on either side counts for nothing; boundary = prompt length + r - 1."""
    batch = collate([Example(7, (5, 6, 7), (8, END)), Example(3, (5,), (8, 9, 10, END))], pad=2)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, END], [5, 8, 9, 10, END]]
    assert batch["labels"].tolist() == [[IGNORED] * 3 + [8, END], [IGNORED, 8, 9, 10, END]]
    assert batch["index"].tolist() == [7, 3]
    assert boundaries(batch, torch.tensor([1, 3])).tolist() == [3, 3]
    assert positions(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])).tolist() == [[0, 0, 0, 1], [0, 1, 2, 2]]
