"""Is a model.txt what LightGBM would have written for our features? Decided without LightGBM.

LightGBM's parser and its prediction trust the text: a wrong length, a child index out of range or a cycle reads wild
memory or never ends. So every number that steers them is checked here first, in plain Python.
"""

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lorazor.features.errors import InputError

MAX_BYTES = 64 << 20

_FINITE = r"-?[0-9]+(?:\.[0-9]+)?(?:e[-+]?[0-9]{1,3})?"


def _list_of(number: str) -> re.Pattern[str]:
    return re.compile(rf"(?:(?:{number})(?: (?:{number}))*)?")


_INTEGERS = _list_of(r"-?[0-9]{1,10}")
_NUMBERS = _list_of(_FINITE)
_THRESHOLDS = _list_of(rf"{_FINITE}|-?inf")  # a split of missing from not missing has the threshold inf
_UNUSED = _list_of(rf"{_FINITE}|-?inf|-?nan")
_OBJECTIVE = re.compile(r"binary sigmoid:[0-9]+(?:\.[0-9]+)?")
_DECISIONS = (0, 2, 4, 6, 8, 10)
"""Numerical splits only: bit 0 (categorical) is clear, bit 1 is the default side, bits 2-3 how NaN is treated."""

_TEXT_END = "end of trees\n"
_HEADER_KEYS = {
    "version",
    "num_class",
    "num_tree_per_iteration",
    "label_index",
    "max_feature_idx",
    "objective",
    "feature_names",
    "monotone_constraints",
    "feature_infos",
    "tree_sizes",
}
_PER_SPLIT = ("split_feature", "decision_type", "left_child", "right_child")
_PER_SPLIT_UNUSED = ("split_gain", "internal_value", "internal_weight", "internal_count")
_PER_LEAF_UNUSED = ("leaf_weight", "leaf_count")


def checked_model_text(text: str, features: Sequence[str]) -> str:
    """The part of a LightGBM model text that prediction needs: header and trees, not the training parameters.

    Args:
        text: what `Booster.model_to_string()` gives for a binary classifier without categorical features.
        features: the names that the model must have been trained on, in this order.

    Raises:
        InputError: the first thing that is not so.
    """
    if len(text) > MAX_BYTES:
        raise InputError(f"model.txt: {len(text)} bytes, the limit is {MAX_BYTES}")
    if not text.isascii() or not text.startswith("tree\n"):
        raise InputError("model.txt: not the text of a LightGBM model")
    head, gap, _ = text.partition("\n\n")
    if not gap:
        raise InputError("model.txt: cut off before the first tree")
    header = _fields(head.split("\n")[1:], "the header")
    _check_header(header, features)
    start = len(head) + len(gap)
    sizes = _integers(header, "tree_sizes", "the header")
    for number, size in enumerate(sizes):
        block = text[start : start + size]
        if len(block) != size or not block.startswith(f"Tree={number}\n"):
            raise InputError(f"model.txt: tree {number} is cut off or not where the header says")
        _check_tree(block, number, len(features))
        start += size
    if not text.startswith(_TEXT_END, start):
        raise InputError(f"model.txt: cut off, or more trees than the {len(sizes)} of the header")
    return f"{text[:start]}{_TEXT_END}\n"


def _check_header(header: dict[str, str], features: Sequence[str]) -> None:
    unknown = header.keys() - _HEADER_KEYS
    if unknown:
        raise InputError(f"model.txt: unknown header field {min(unknown)}")
    names = header.get("feature_names", "").split(" ")
    if len(names) != len(features):
        raise InputError(f"model.txt: the model has {len(names)} features, the schema {len(features)}")
    for got, wanted in zip(names, features, strict=True):
        if got != wanted:
            raise InputError(f"model.txt: the model has the feature {got[:60]!r} where the schema has {wanted!r}")
    wanted_fields = {"version": "v4", "num_class": "1", "num_tree_per_iteration": "1"}
    wanted_fields |= {"max_feature_idx": str(len(features) - 1)}
    for key, value in wanted_fields.items():
        if header.get(key) != value:
            raise InputError(f"model.txt: {key} must be {value}, got {str(header.get(key))[:60]}")
    if not _OBJECTIVE.fullmatch(header.get("objective", "")):
        raise InputError(f"model.txt: the objective must be binary, got {header.get('objective', 'none')[:60]!r}")
    if len(header.get("feature_infos", "").split(" ")) != len(features):
        raise InputError(f"model.txt: feature_infos must have {len(features)} entries")
    if "monotone_constraints" in header:
        _check_length(_integers(header, "monotone_constraints", "the header"), len(features), "monotone_constraints")


def _check_tree(block: str, number: int, features: int) -> None:
    where = f"tree {number}"
    tree = _fields(block.rstrip("\n").split("\n")[1:], where)
    counts = _integers(tree, "num_leaves", where)
    _check_length(counts, 1, f"{where}, num_leaves")
    leaves = int(counts[0])
    if leaves < 1:
        raise InputError(f"model.txt: {where} has {leaves} leaves")
    if tree.get("num_cat") != "0" or tree.get("is_linear", "0") != "0":
        raise InputError(f"model.txt: {where} has categorical splits or linear leaves, which LoRazor does not use")
    _check_length(_read(tree, "leaf_value", where, _NUMBERS), leaves, f"{where}, leaf_value")
    _check_length(_read(tree, "shrinkage", where, _NUMBERS), 1, f"{where}, shrinkage")
    split = {key: _integers(tree, key, where) for key in _PER_SPLIT}
    _check_length(_read(tree, "threshold", where, _THRESHOLDS), leaves - 1, f"{where}, threshold")
    for key, values in split.items():
        _check_length(values, leaves - 1, f"{where}, {key}")
    for key in (*_PER_SPLIT_UNUSED, *_PER_LEAF_UNUSED):
        unused = _read(tree, key, where, _UNUSED)
        if unused.size:
            _check_length(unused, leaves if key in _PER_LEAF_UNUSED else leaves - 1, f"{where}, {key}")
    if not ((split["split_feature"] >= 0) & (split["split_feature"] < features)).all():
        raise InputError(f"model.txt: {where} splits on a feature that does not exist")
    if not np.isin(split["decision_type"], _DECISIONS).all():
        raise InputError(f"model.txt: {where} has an unknown decision_type")
    # Each split but the root, and each leaf (written -1 - index), hangs below exactly one split: then what the root
    # reaches is a tree, whatever the order.
    children = np.sort(np.concatenate([split["left_child"], split["right_child"]]))
    if leaves > 1 and not np.array_equal(children, np.r_[-leaves:0, 1 : leaves - 1]):
        raise InputError(f"model.txt: the children of {where} do not form a tree")


def _fields(lines: list[str], where: str) -> dict[str, str]:
    pairs = [line.partition("=") for line in lines]
    fields = {key: value for key, _, value in pairs}
    if len(fields) < len(pairs) or not all(equals for _, equals, _ in pairs):
        raise InputError(f"model.txt: {where} has a line that is not a new key=value")
    return fields


def _read(fields: dict[str, str], key: str, where: str, pattern: re.Pattern[str]) -> npt.NDArray[np.float64]:
    value = fields.get(key, "")
    numbers = np.array(value.split(" ") if value else [], dtype=np.float64) if pattern.fullmatch(value) else None
    # The written form may be that of a finite number and still be too large for one, such as 1e999.
    if numbers is None or (pattern in (_INTEGERS, _NUMBERS) and not np.isfinite(numbers).all()):
        raise InputError(f"model.txt: {where}, {key} is not a list of finite numbers")
    return numbers


def _integers(fields: dict[str, str], key: str, where: str) -> npt.NDArray[np.int64]:
    return _read(fields, key, where, _INTEGERS).astype(np.int64)


def _check_length(values: npt.NDArray[np.generic], wanted: int, what: str) -> None:
    if len(values) != wanted:
        raise InputError(f"model.txt: {what} has {len(values)} values, must have {wanted}")
