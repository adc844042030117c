"""The demo's two tasks: generators of requests whose answers can be scored exactly. All of the text is our own.

`booking`: a sentence about a table booking becomes a card in the house format. Once the prompt is read, all is decided:
an adapter trained for it leaves so much in the keys and values that the base can often write the card alone.

`dispatch`: a list of items becomes their stock codes, which only the adapter knows, and then the customer's note, word
for word, which the base can copy. One to eight codes come first, so the right moment to release differs per request.

    python examples/tasks.py dispatch --count 1500 > dispatch.jsonl
"""

import argparse
import hashlib
import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Literal, TypedDict

Split = Literal["finetune", "collect"]

MARKER = " |"  # ends the stock codes of a dispatch line, and each field but the last of a booking card


class Message(TypedDict):
    role: str
    content: str


class Item(TypedDict):
    """One request: `reference` is the only right answer (exact match)."""

    id: str
    messages: list[Message]
    reference: str


def generate(task: str, count: int, seed: int = 0, split: Split = "collect") -> Iterator[Item]:
    """`count` items of `task` with distinct prompts.

    A prompt's hash says which split it belongs to, so an adapter, trained on one split, has never seen a prompt of the
    other, whatever the seeds.
    """
    rng = Random(f"{task} {seed}")
    seen: set[str] = set()
    while len(seen) < count:
        prompt, reference = TASKS[task](rng)
        if prompt in seen or _split_of(prompt) != split:
            continue
        message = Message(role="user", content=prompt)
        yield Item(id=f"{task}-{split}-{seed}-{len(seen):05d}", messages=[message], reference=reference)
        seen.add(prompt)


def score(text: str, reference: str) -> float:
    """1 where the text equals the reference but for white space at its ends, else 0."""
    return float(text.strip() == reference)


def _split_of(prompt: str) -> Split:
    return "finetune" if hashlib.sha256(prompt.encode()).digest()[0] < 128 else "collect"


def _list(text: str) -> list[str]:
    return text.split(", ")


NAMES = _list(
    "Mara, Jonas, Priya, Tomas, Elena, Victor, Amina, Oscar, Greta, Hugo, Leila, Simon, Nora, Felix, Ingrid, Pablo"
)
PLACES = _list("Blue Heron, Old Mill, Copper Kettle, Green Lantern, Harbour House, Silver Birch, Lemon Tree, Red Barn")
DAYS = _list("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday")
COUNTS = _list("two, three, four, five, six, seven, eight, nine")
WISHES = _list("window seat, high chair, quiet corner, vegan menu, birthday cake, seat outside, large table")
BOOKINGS = (
    "{name} booked a table for {count} at the {place} on {day} at {time} and would like a {wish}.",
    "On {day} at {time} the {place} expects {name} with a party of {count}, who asked for a {wish}.",
    "The {place} has a booking by {name}: {count} people, {day}, {time}. They want a {wish}.",
    "Please keep a {wish} for {name}, who comes to the {place} at {time} on {day} with {count} people in all.",
)


def _booking(rng: Random) -> tuple[str, str]:
    name, place, day, wish = (rng.choice(options) for options in (NAMES, PLACES, DAYS, WISHES))
    guests = rng.randrange(len(COUNTS))
    time = f"{rng.randint(11, 22)}:{rng.choice(('00', '15', '30', '45'))}"
    text = rng.choice(BOOKINGS).format(name=name, place=place, day=day, time=time, count=COUNTS[guests], wish=wish)
    card = f"{place} | {day[:3]} {time} | {guests + 2} guests | {name} | {wish}"
    return f"Write the booking card.\n\n{text}", card


GOODS = _list(
    "mug, lamp, chair, table, rug, clock, mirror, basket, kettle, pan, bowl, plate, fork, spoon, knife, towel, pillow, "
    "blanket, candle, vase, shelf, stool, bench, ladder, bucket, broom, brush, rope, chain, hammer, saw, drill, nail, "
    "screw, glove, boot, scarf, hat, belt, coat, pencil, pen, ruler, notebook, stapler, folder, stamp, envelope, "
    "drum, flute, violin, guitar, ball, kite, puzzle, doll, tent, map, lantern, compass, whistle, camera, radio, jar"
)
LETTERS = "BCDFGHJKLMNPQRSTVWXZ"
ALL_CODES = [a + b + n for a in LETTERS for b in LETTERS for n in "23456789"]
# The stock codes: fixed, and in no way derived from the words, so that only an adapter trained on them can know them.
CODES = dict(zip(GOODS, Random(20).sample(ALL_CODES, len(GOODS)), strict=True))
THINGS = _list("parcel, box, crate, bag, order, package")
SPOTS = _list("behind, beside, in front of, next to, close to, under, near, outside")
COLOURS = _list("green, red, blue, white, yellow, brown, grey, black, old, new")
LANDMARKS = _list("door, gate, shed, fence, garage, bench, porch, wall, tree, window")
ACTIONS = _list(
    "ring the bell twice, call me before noon, send a short message, knock at the side door, tell the man at the desk, "
    "wait for my sister, take the empty crates with you, leave the invoice in the mailbox, ask for a signature"
)
REASONS = _list(
    "the baby sleeps after lunch, we are out until late in the evening, the lift is broken again, "
    "our dog is very loud, the street is closed this week, I work at night and sleep in the morning"
)


def _note(rng: Random) -> str:
    """A customer's note of 7 to 24 words in everyday English."""
    place = f"{rng.choice(SPOTS)} the {rng.choice(COLOURS)} {rng.choice(LANDMARKS)}"
    note = f"please leave the {rng.choice(THINGS)} {place}"
    if rng.random() < 0.5:
        note += f" and {rng.choice(ACTIONS)}"
    if rng.random() < 0.35:
        note += f" because {rng.choice(REASONS)}"
    return note


def _dispatch(rng: Random) -> tuple[str, str]:
    goods = rng.sample(GOODS, rng.randint(1, 8))
    note = _note(rng)
    prompt = (
        "Write the dispatch line: the stock code of each item, then a bar, then the note word for word.\n\n"
        f"Items: {', '.join(goods)}\nNote: {note}"
    )
    return prompt, f"{' '.join(CODES[item] for item in goods)}{MARKER} {note}"


TASKS: dict[str, Callable[[Random], tuple[str, str]]] = {"booking": _booking, "dispatch": _dispatch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=sorted(TASKS))
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for item in generate(args.task, args.count, args.seed):
        print(json.dumps(item))


if __name__ == "__main__":
    main()
