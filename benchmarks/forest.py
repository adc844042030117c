"""The policy's trees on a GPU: microseconds of one batch of decisions, LightGBM on one thread of the CPU beside it.

    python benchmarks/forest.py --out forest.csv     # tests first; 1, 16, 256 and 1,024 rows, 200 trees of 31 leaves

Times of the kernel are the device's: medians, p20 and p80 of replays of a CUDA graph of several launches, over rows
that differ from launch to launch. LightGBM's are the host's, as the server calls it. Scores are first held against
LightGBM's; with an error above 1e-6 there is no time.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import lightgbm
import numpy as np
import torch
from engines import provenance, run_tests, write_rows
from kernel_paths import alternate, spread

from lorazor.features.schema import FEATURES, PROBE_FEATURES
from lorazor.kernels.forest import Forest, pack, score
from lorazor.policy.scorer import Scorer

LAUNCHES = 20  # in a graph, so that what starts and ends a replay does not count
TOLERANCE = 1e-6


def random_rows(rng: np.random.Generator, n: int) -> np.ndarray:
    """[n, F] with a tenth missing."""
    rows = rng.normal(size=(n, len(FEATURES))).astype(np.float32)
    rows[rng.random(rows.shape) < 0.1] = np.nan
    return rows


def make_scorer_text(trees: int = 200, leaves: int = 31, probes: bool = True) -> str:
    """A model on noisy labels that many features decide, so that trees grow deep and unlike each other; on probes' or
    without them."""
    rng = np.random.default_rng(0)
    rows = random_rows(rng, 20_000)
    if not probes:
        rows[:, [FEATURES.index(name) for name in PROBE_FEATURES]] = np.nan
    labels = np.nan_to_num(rows) @ rng.normal(size=len(FEATURES)) + 4 * rng.normal(size=len(rows)) > 0
    data = lightgbm.Dataset(rows, labels, feature_name=list(FEATURES))
    params = {"objective": "binary", "num_leaves": leaves, "learning_rate": 0.05, "verbose": -1, "seed": 0}
    return str(lightgbm.train(params, data, trees).model_to_string())


def on_host(scorer: Scorer, rows: np.ndarray, replays: int) -> dict[str, float]:
    """Milliseconds of LightGBM: median, p20, p80."""
    spent = []
    for _ in range(replays):
        start = time.perf_counter()
        scorer.score(rows)
        spent.append((time.perf_counter() - start) * 1e3)
    return spread(spent)


def on_device(forest: Forest, rows: torch.Tensor, replays: int) -> dict[str, float]:
    """Milliseconds of one launch: median, p20, p80."""
    batches = [rows[torch.randperm(len(rows), device="cuda")] for _ in range(LAUNCHES)]
    score(forest, rows)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for batch in batches:
            score(forest, batch)
    times = alternate({"forest": graph.replay}, replays)["forest"]
    return {name: value / LAUNCHES for name, value in times.items()}


def main() -> None:
    """Tests, then the numbers of rows in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,16,256,1024")
    parser.add_argument("--trees", type=int, default=200)
    parser.add_argument("--leaves", type=int, default=31)
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("forest.csv"))
    parser.add_argument("--skip-tests", action="store_true")
    options = parser.parse_args()
    if not options.skip_tests:
        run_tests("test_forest.py")
    scorer = Scorer(make_scorer_text(options.trees, options.leaves))
    arrays = scorer.forest()
    forest = pack(**vars(arrays), device="cuda")
    made, table = provenance(), []
    for n in map(int, options.rows.split(",")):
        rows = random_rows(np.random.default_rng(n), n)
        found = torch.from_numpy(rows).cuda()
        error = float(np.abs(score(forest, found).cpu().numpy() - scorer.score(rows)).max())
        if not error <= TOLERANCE:
            sys.exit(f"{n} rows: the scores are off by {error:.1e}, so there is no time.")
        times = {"kernel": on_device(forest, found, options.replays)}
        times["LightGBM"] = on_host(scorer, rows, options.replays)
        for path, milliseconds in times.items():
            us, p20, p80 = (1e3 * value for value in milliseconds.values())
            shape = {"rows": n, "trees": scorer.trees, "leaves": options.leaves, "depth": int(arrays.depth.max())}
            table.append({**shape, "path": path, "us": us, "p20": p20, "p80": p80, "error": error, **made})
            print(f"{n:5} rows  {path:9}{us:9.1f} us   error {error:.1e}", flush=True)
        write_rows(options.out, table)


if __name__ == "__main__":
    main()
