"""Scorers of plain text: exact match, patterns, format constraints, refusals, numbers, ROUGE-L and BLEU.

Every scorer is a function of (text, example, **settings) -> float in [0, 1]. `example` is the request's row of the
JSONL file; where it holds several references the best one counts.
"""

import math
import re
import string
from functools import cache
from typing import Any

from lorazor.features.errors import InputError

Example = dict[str, Any]

REFUSAL = re.compile(
    r"\b(?:i(?:'m| am)(?: (?:very|really|so|truly))? sorry|sorry,|i apologi[sz]e|my apologies|as an ai\b"
    r"|i(?:'m| am) (?:just |only )?an? (?:ai|language model)"
    r"|i(?:'m| am) (?:not able|unable|not allowed|not permitted|not comfortable|not programmed)"
    r"|i (?:can ?not|can't|could not|couldn't|won't|will not|must decline|must refuse|have to decline|decline|refuse)"
    r"(?: to)?\b(?! (?:help but|wait|believe|say enough|think of))"
    r"|(?:is|it's|that's|would be) against (?:my|the) (?:guidelines|policy|policies|rules|programming)"
    r"|(?:can ?not|can't|unable to) (?:assist|help|comply|fulfil|provide|answer))"
)
REFUSAL_WINDOW = 200  # characters: a refusal opens a reply; later the same words are usually part of an answer

NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|(?<![\w.])[-+]?\.\d+")


def references(example: Example) -> list[Any]:
    """The acceptable answers of a row: its `reference`, as a list when it is not one already."""
    if "reference" not in example:
        raise InputError('the row has no "reference"')
    found = example["reference"]
    if found == []:
        raise InputError('"reference" is an empty list')
    return found if isinstance(found, list) else [found]


def text_references(example: Example) -> list[str]:
    """The references of a row, which must be strings or numbers."""
    for value in (found := references(example)):
        if not isinstance(value, str | int | float):
            raise InputError(f'"reference" must be text or a list of texts, got {value!r}')
    return [str(value) for value in found]


def exact_match(
    text: str,
    example: Example,
    *,
    ignore_case: bool = False,
    ignore_punctuation: bool = False,
    first_line: bool = False,
) -> float:
    """1 when the text equals a reference after runs of white space are made one blank."""

    def plain(value: str) -> str:
        value = value.strip().split("\n")[0] if first_line else value
        value = value.casefold() if ignore_case else value
        value = value.translate(str.maketrans("", "", string.punctuation)) if ignore_punctuation else value
        return " ".join(value.split())

    return float(plain(text) in {plain(value) for value in text_references(example)})


def regex_match(
    text: str, example: Example, *, pattern: str | None = None, full: bool = False, ignore_case: bool = False
) -> float:
    """1 when the pattern (the setting, else the row's `pattern`, else its reference) is found in the stripped text."""
    patterns = [pattern or example.get("pattern")] if pattern or "pattern" in example else text_references(example)
    flags = re.IGNORECASE if ignore_case else 0
    for source in patterns:
        try:
            compiled = re.compile(str(source), flags)
        except re.error as error:
            raise InputError(f"the pattern {source!r} is not a regular expression: {error}") from None
        if compiled.fullmatch(text.strip()) if full else compiled.search(text):
            return 1.0
    return 0.0


def refused(text: str) -> bool:
    """Whether the text opens like a refusal or an apology for not answering (English phrases)."""
    return REFUSAL.search(text[:REFUSAL_WINDOW].replace("’", "'").lower()) is not None


def refusal(text: str, example: Example, *, empty_is_refusal: bool = True) -> float:
    """1 when the text is no refusal. An empty text counts as one unless told otherwise; no reference is read."""
    return 0.0 if refused(text) or (empty_is_refusal and not text.strip()) else 1.0


def numbers(text: str) -> list[float]:
    """The numbers written in a text, in order; thousands may be separated by commas."""
    return [float(found.replace(",", "")) for found in NUMBER.findall(text)]


def number_match(text: str, example: Example, *, marker: str | None = None, tolerance: float = 1e-6) -> float:
    """1 when the last number, or the first one after the last `marker`, equals a reference within `tolerance`.

    The tolerance is relative, and absolute for a reference of zero. A text without the marker, or without a number
    there, scores 0.
    """
    if marker is not None and marker not in text:
        return 0.0
    found = numbers(text.rpartition(marker)[2])[:1] if marker is not None else numbers(text)[-1:]
    wanted = [number for value in text_references(example) for number in numbers(value)[-1:]]
    if not wanted:
        raise InputError(f'"reference" holds no number: {example["reference"]!r}')
    return float(any(math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance) for a in found for b in wanted))


@cache
def _rouge(stemmer: bool) -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], use_stemmer=stemmer)


def rouge_l(text: str, example: Example, *, stemmer: bool = True) -> float:
    """F-measure of ROUGE-L (Lin 2004, by the rouge-score library) against the best reference."""
    return float(_rouge(stemmer).score_multi(text_references(example), text)["rougeL"].fmeasure)


def bleu(text: str, example: Example, *, lowercase: bool = False) -> float:
    """Sentence BLEU (sacrebleu, exponential smoothing) over all references, divided by 100."""
    from sacrebleu import sentence_bleu

    score = float(sentence_bleu(text, text_references(example), lowercase=lowercase).score)
    return min(1.0, score / 100)
