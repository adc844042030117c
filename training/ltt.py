"""Learn then Test (arXiv 2110.01052) by fixed-sequence testing: from p-values to the one threshold that is kept.

The order of the tests is fixed before the calibration data are read, so each may use the whole level: the first
threshold that breaks the promise is reached only through itself, and passing it has a chance of at most the level.
"""

from __future__ import annotations

import numpy as np

from lorazor.training.pvalues import Floats


def fixed_sequence(p_values: Floats, level: float) -> int | None:
    """The index of the last threshold that passed; None when the first fails.

    `p_values` [k] are in the order of testing, the strictest (highest) threshold first. Each is tested at `level` =
    1 - confidence, and the first p > level ends the tests whatever follows it. NaN fails.
    """
    failed = np.flatnonzero(~(np.asarray(p_values) <= level))
    passed = len(p_values) if not len(failed) else int(failed[0])
    return passed - 1 if passed else None
