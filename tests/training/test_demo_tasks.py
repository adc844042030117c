"""The demo's task generators."""

import pytest

from examples.tasks import CODES, MARKER, TASKS, generate, score


@pytest.mark.parametrize("task", sorted(TASKS))
def test_prompts_are_distinct_seeded_and_never_shared_between_the_splits(task: str) -> None:
    """Equal seeds give equal items; no prompt occurs twice, nor in both splits."""
    collect = list(generate(task, 400, seed=1))
    finetune = list(generate(task, 400, seed=1, split="finetune"))
    assert collect == list(generate(task, 400, seed=1))
    assert len({item["messages"][0]["content"] for item in collect + finetune}) == 800
    assert len({item["id"] for item in collect + finetune}) == 800


def test_dispatch_references_hold_the_codes_in_order_and_then_the_note() -> None:
    """The reference follows from the prompt's items and note; code counts from one to eight all occur."""
    counts = set()
    for item in generate("dispatch", 200):
        goods, note = item["messages"][0]["content"].split("Items: ")[1].split("\nNote: ")
        codes = [CODES[good] for good in goods.split(", ")]
        assert item["reference"] == f"{' '.join(codes)}{MARKER} {note}"
        counts.add(len(codes))
    assert counts == set(range(1, 9))
    assert len(set(CODES.values())) == len(CODES)


def test_booking_references_hold_the_facts_of_the_sentence() -> None:
    """Place, time, name and wish of a card stand in its sentence."""
    for item in generate("booking", 200):
        place, when, _guests, name, wish = item["reference"].split(MARKER + " ")
        sentence = item["messages"][0]["content"]
        assert all(fact in sentence for fact in (place, when[:3], when[4:], name, wish))


def test_score_is_exact_but_for_white_space_at_the_ends() -> None:
    """Only the reference itself, padded or not, scores 1."""
    assert score(" BX4 | hello\n", "BX4 | hello") == 1.0
    assert score("BX4 |  hello", "BX4 | hello") == 0.0
