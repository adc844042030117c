"""A program, run in a process of its own: let LightGBM parse the model text on stdin and score a few rows.

`scorer.py` starts it, because LightGBM can abort, crash or hang on a bad text. It prints one line of JSON. It is run by
its path and imports nothing of LoRazor, so that it starts in a fraction of a second.
"""

import json
import resource
import sys

MEMORY_BYTES = 4 << 30
"""Far above what a model takes, far below what a machine has."""


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for heavy in ("pandas", "sklearn", "dask", "matplotlib", "pyarrow", "cffi", "graphviz"):
        sys.modules[heavy] = None  # type: ignore[assignment]  # LightGBM does without, and takes 0.3 s in place of 1.5
    import lightgbm
    import numpy as np

    booster = lightgbm.Booster(model_str=sys.stdin.read())
    rows = np.array([np.nan, 0.0, 1.0, -1e30, 1e30, -np.inf, np.inf], dtype=np.float32)
    features = np.repeat(rows[:, None], booster.num_feature(), axis=1)
    scores = booster.predict(features, num_threads=1)
    print(json.dumps({"features": booster.feature_name(), "scores": np.asarray(scores).tolist()}))  # noqa: T201


if __name__ == "__main__":
    main()
