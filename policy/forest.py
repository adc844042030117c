"""The trees of a checked model as plain arrays, in which every comparison has LightGBM's outcome on float32 features.

LightGBM compares doubles. For a float32 feature x and a double threshold t, x <= t exactly if x <= the largest float32
that is not above t, so thresholds are rounded down and stay exact. What LightGBM does with a missing value and with
zero (any |x| <= ZERO, which it reads as 0.0) depends on the split alone, so both sides are worked out here:

    missing_type None: NaN counts as 0.0
    missing_type Zero: zero, and NaN, which counts as 0.0, take the split's default side
    missing_type NaN:  NaN takes the default side; zero is a number like any other

The nodes of a tree stand level by level and siblings side by side, so the left child's place says where the right one
is, and the splits near the root, which every row passes, are neighbours.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lorazor.policy.model_text import checked_model_text

ZERO = np.float32(1e-35)
"""LightGBM's kZeroThreshold."""


@dataclass(frozen=True)
class Forest:
    """Trees one after the other; a leaf is a split that sends every value back to itself.

    Attributes:
        feature: int32 [nodes], the feature that the node looks at; 0 at a leaf.
        threshold: float32 [nodes]; a value goes left if it is at most this. No value lies strictly between -ZERO and 0.
        nan_left, zero_left: bool [nodes], whether NaN goes left, and |x| <= ZERO, whatever the threshold.
        child: int32 [nodes], the left child's place in its tree; the right one stands behind it. A leaf's own place.
        value: float64 [nodes]; 0 at a split.
        first: int32 [trees + 1], where each tree's nodes start.
        depth: int32 [trees], the splits on the longest way to a leaf.
        sigmoid: the score is 1 / (1 + e^(-sigmoid · sum of the leaves' values)).
        features: how many features a row has.
    """

    feature: npt.NDArray[np.int32]
    threshold: npt.NDArray[np.float32]
    nan_left: npt.NDArray[np.bool_]
    zero_left: npt.NDArray[np.bool_]
    child: npt.NDArray[np.int32]
    value: npt.NDArray[np.float64]
    first: npt.NDArray[np.int32]
    depth: npt.NDArray[np.int32]
    sigmoid: float
    features: int

    @property
    def is_split(self) -> npt.NDArray[np.bool_]:
        """bool [nodes]: no leaf, which is its own child."""
        own_place = np.arange(len(self.child)) - np.repeat(self.first[:-1], np.diff(self.first))
        found: npt.NDArray[np.bool_] = self.child != own_place
        return found


def parse_forest(model_txt: str, features: Sequence[str]) -> Forest:
    """The trees of LightGBM's text of a binary classifier on these features.

    Raises:
        InputError: what `checked_model_text` refuses: damage, another objective, averaged trees (random forests),
            several classes, categorical splits, linear leaves, other features.
    """
    text = checked_model_text(model_txt, features)
    head, *blocks = text.partition("end of trees\n")[0].split("\nTree=")
    sigmoid = re.search(r"^objective=binary sigmoid:(\S+)$", head, re.MULTILINE)
    assert sigmoid is not None  # or the check would have refused it
    trees = [_tree(dict(line.split("=", 1) for line in block.splitlines()[1:] if line)) for block in blocks]
    nodes = {key: np.concatenate([_NONE[key], *(tree[key] for tree, _ in trees)]) for key in _NONE}
    sizes = [len(tree["child"]) for tree, _ in trees]
    return Forest(
        **nodes,
        first=np.cumsum([0, *sizes], dtype=np.int32),
        depth=np.array([depth for _, depth in trees], dtype=np.int32),
        sigmoid=float(sigmoid[1]),
        features=len(features),
    )


_NONE = {
    "feature": np.empty(0, np.int32),
    "threshold": np.empty(0, np.float32),
    "nan_left": np.empty(0, np.bool_),
    "zero_left": np.empty(0, np.bool_),
    "child": np.empty(0, np.int32),
    "value": np.empty(0, np.float64),
}


def rounded_down(threshold: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """The largest float32 that is not above; between -ZERO and 0, where only zero itself may lie, -ZERO."""
    with np.errstate(over="ignore", under="ignore"):
        nearest = threshold.astype(np.float32)
        down = np.where(nearest > threshold, np.nextafter(nearest, np.float32(-np.inf)), nearest)
    return np.where((threshold < 0.0) & (down > -ZERO), -ZERO, down).astype(np.float32)


def _tree(fields: Mapping[str, str]) -> tuple[dict[str, npt.NDArray[np.generic]], int]:
    """One tree's nodes and its depth. LightGBM counts splits from 0 and writes the leaf i as -1 - i."""
    order, depth = _by_level(_integers(fields, "left_child"), _integers(fields, "right_child"))
    is_split = order >= 0
    split = order[is_split]
    threshold, decision = _floats(fields, "threshold"), _integers(fields, "decision_type")
    default_left, missing = (decision & 2) > 0, decision >> 2
    zero_as_number = threshold >= 0.0
    tree: dict[str, npt.NDArray[np.generic]] = {
        "feature": np.zeros(len(order), np.int32),
        "threshold": np.full(len(order), np.inf, np.float32),
        "nan_left": np.ones(len(order), np.bool_),
        "zero_left": np.ones(len(order), np.bool_),
        "child": np.arange(len(order), dtype=np.int32),
        "value": np.zeros(len(order), np.float64),
    }
    tree["feature"][is_split] = _integers(fields, "split_feature")[split]
    tree["threshold"][is_split] = rounded_down(threshold)[split]
    tree["nan_left"][is_split] = np.where(missing == 0, zero_as_number, default_left)[split]
    tree["zero_left"][is_split] = np.where(missing == 1, default_left, zero_as_number)[split]
    # Siblings were appended in pairs, in the order of their parents.
    tree["child"][is_split] = 1 + 2 * np.arange(len(split))
    tree["value"][~is_split] = _floats(fields, "leaf_value")[-1 - order[~is_split]]
    return tree, depth


def _by_level(left: npt.NDArray[np.int64], right: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], int]:
    """Splits and leaves (negative) level by level, siblings side by side; and the number of levels below the root."""
    levels = [np.array([0 if len(left) else -1])]
    while (parents := levels[-1][levels[-1] >= 0]).size:
        levels.append(np.stack([left[parents], right[parents]], axis=1).ravel())
    return np.concatenate(levels), len(levels) - 1


def _floats(fields: Mapping[str, str], key: str) -> npt.NDArray[np.float64]:
    return np.array(fields.get(key, "").split(), dtype=np.float64)


def _integers(fields: Mapping[str, str], key: str) -> npt.NDArray[np.int64]:
    return _floats(fields, key).astype(np.int64)
