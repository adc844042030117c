"""The model of a policy: features in, score out, to the last bit what LightGBM's `Booster.predict` gives."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import lightgbm
import numpy as np
import numpy.typing as npt

from lorazor.features.errors import InputError
from lorazor.features.schema import FEATURES
from lorazor.policy.forest import Forest, parse_forest
from lorazor.policy.model_text import checked_model_text

PARSE_SECONDS = 20.0
"""Time limit of the child process; a model of 1,000 trees takes it well under one second."""

_PROBE = Path(__file__).with_name("model_probe.py")


class Scorer:
    """Scores rows of features, on one thread of the CPU.

    The text is checked, then parsed once in a child process with a time limit, and only then in this one.

    Args:
        model_txt: LightGBM's own text of a binary classifier.
        features: the ordered names that it must have been trained on.

    Raises:
        InputError: the text is damaged or hostile, or the model is not a binary one on these features.
    """

    def __init__(self, model_txt: str, features: Sequence[str] = FEATURES) -> None:
        self._features = tuple(features)
        text = checked_model_text(model_txt, self._features)
        _parse_in_child(text, self._features, PARSE_SECONDS)
        self._text = text
        self._booster = lightgbm.Booster(model_str=text)

    def score(self, features: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        """[n] in [0, 1], how sure the policy is that releasing now is safe, for features [n, F]; NaN is missing.

        Each row's score is the same whatever rows stand beside it.
        """
        rows = np.ascontiguousarray(features, dtype=np.float32)
        if rows.ndim != 2 or rows.shape[1] != len(self._features):
            raise ValueError(f"features must be [n, {len(self._features)}], got {list(rows.shape)}")
        return np.asarray(self._booster.predict(rows, num_threads=1), dtype=np.float64)

    def importance(self) -> dict[str, float]:
        """Gain of each feature that is used, as a share of the whole, the largest first."""
        gain = self._booster.feature_importance(importance_type="gain")
        total = float(gain.sum()) or 1.0
        order = np.argsort(-gain, kind="stable")
        return {self._features[i]: float(gain[i]) / total for i in order if gain[i] > 0.0}

    def splits_on(self) -> set[str]:
        """The features that some tree splits on, whatever gain the text claims for it."""
        forest = self.forest()
        return {self._features[i] for i in set(forest.feature[forest.is_split].tolist())}

    def forest(self) -> Forest:
        """The trees as plain arrays, for scoring on another device (`kernels/forest.py`)."""
        return parse_forest(self._text, self._features)

    @property
    def trees(self) -> int:
        """How many trees the model has."""
        return int(self._booster.num_trees())


def _parse_in_child(text: str, features: tuple[str, ...], seconds: float) -> None:
    # -P: this folder holds an inspect.py, which must not hide the standard library's.
    command = [sys.executable, "-P", str(_PROBE)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=seconds, env=env, check=False
        )
    except subprocess.TimeoutExpired:
        raise InputError(f"model.txt: LightGBM did not finish reading it in {seconds:g} s") from None
    if done.returncode < 0:
        raise InputError(f"model.txt: LightGBM's parser died of it (signal {-done.returncode})")
    if done.returncode > 0:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise InputError(f"model.txt: LightGBM cannot read it ({reason[:200]})")
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    if tuple(answer["features"]) != features:
        raise InputError("model.txt: LightGBM reads other feature names than the schema's")
    scores = np.asarray(answer["scores"], dtype=np.float64)
    if scores.ndim != 1 or not ((scores >= 0.0) & (scores <= 1.0)).all():
        raise InputError(f"model.txt: a score must lie in [0, 1], got {answer['scores']!r:.60}")
