"""The fused signals on a GPU: microseconds beside what the bytes cost, and beside the torch path of the features.

    python benchmarks/signals.py --out signals.csv                  # tests first; 8, 128 and 256 rows x 128,256 tokens

Times are the device's: medians, p20 and p80 of CUDA graph replays that take turns. A graph runs over several batches
of logits, different ones, more than the cache holds ("cold"), or several times over one batch ("warm", which is nearer
to a server, where the logits have just been written). Paths: `pass` is the pass over the logits alone, `adapter` both
launches, `probe` all four launches with the adapter's summary given (a probe of every row, which a server does not do),
`torch …` the reference. Each is first held against the reference, and one that is off gets no time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from engines import provenance, run_tests, write_rows
from kernel_paths import alternate
from kernel_points import BYTES_PER_MS

from lorazor.features import signals as reference
from lorazor.kernels.probe_signals import probe_signals
from lorazor.kernels.signals import adapter_signals
from lorazor.kernels.summaries import summarise

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # logits, base logits, tokens, summary
CACHE = 2 * 60 << 20  # bytes that a cold graph's batches must exceed: twice an H200's L2
TOLERANCE = 1e-4  # of float32 sums over the whole vocabulary in two orders; the tests hold the kernels to float64

PATHS: dict[str, tuple[int, Callable[[Batch], torch.Tensor]]] = {
    # how often logits of that many rows are read (the torch paths: at least), and the path
    "pass": (1, lambda b: summarise(b[0])),
    "adapter": (1, lambda b: adapter_signals(b[0], b[2])),
    "torch adapter": (1, lambda b: reference.adapter_signals(b[0], b[2])),
    "probe": (3, lambda b: probe_signals(b[0], b[1], b[2], summary=b[3])),
    "torch probe": (2, lambda b: reference.probe_signals(b[0], b[1], b[2])),
}


def make_batch(rows: int, vocabulary: int, dtype: torch.dtype) -> Batch:
    """Logits with one to a few likely tokens, the base's near them."""
    x = torch.randn(rows, vocabulary, device="cuda") * 3
    y = (x + torch.randn_like(x)).to(dtype)
    logits = x.to(dtype)
    return logits, y, torch.randint(0, vocabulary, (rows,), device="cuda"), summarise(logits)


def error(name: str, batch: Batch) -> float:
    """The largest difference from the reference, relative where a value is above 1; 0 for a path that gives none."""
    if name == "pass":
        return 0.0
    found, plain = PATHS[name][1](batch), PATHS[f"torch {name.removeprefix('torch ')}"][1](batch)
    difference = (found - plain).abs() / plain.abs().clamp_min(1.0)
    return float("nan") if not bool(difference.isfinite().all()) else float(difference.max())


def capture(path: Callable[[Batch], torch.Tensor], batches: list[Batch]) -> torch.cuda.CUDAGraph:
    """One graph over the batches, after an eager pass that compiles."""
    path(batches[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for batch in batches:
            path(batch)
    return graph


def measure(rows: int, options: argparse.Namespace) -> list[dict[str, object]]:
    """Rows of the table for one number of rows."""
    dtype = getattr(torch, options.dtype)
    size = rows * options.vocabulary * dtype.itemsize
    count = max(4, -(-CACHE // size))
    batches = [make_batch(rows, options.vocabulary, dtype) for _ in range(count)]
    errors = {name: error(name, batches[0]) for name in PATHS}
    table: list[dict[str, object]] = []
    for memory, some in (("cold", batches), ("warm", batches[:1] * count)):
        graphs = {name: capture(PATHS[name][1], some) for name in PATHS if errors[name] <= TOLERANCE}
        times = alternate({name: graph.replay for name, graph in graphs.items()}, options.replays)
        for name, (reads, _) in PATHS.items():
            spread = {k: 1e3 * v / count for k, v in times[name].items()} if name in times else {}
            row: dict[str, object] = {"rows": rows, "vocabulary": options.vocabulary, "dtype": options.dtype}
            row |= {"memory": memory, "path": name, "us": spread.get("ms"), "p20": spread.get("p20")}
            row |= {"p80": spread.get("p80"), "bytes_us": 1e3 * reads * size / BYTES_PER_MS, "error": errors[name]}
            table.append(row)
    return table


def line(row: dict[str, object]) -> str:
    """One row of the table as text."""
    shown = f"{row['us']:8.1f}" if row["us"] is not None else "   wrong"
    where = f"{row['rows']:4} rows  {row['memory']}  {row['path']:14}"
    return f"{where}{shown} us   bytes {row['bytes_us']:6.1f} us   error {row['error']:.1e}"


def main() -> None:
    """Tests, then the numbers of rows in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="8,128,256")
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("signals.csv"))
    parser.add_argument("--skip-tests", action="store_true")
    options = parser.parse_args()
    if not options.skip_tests:
        run_tests("test_signals.py")
    torch.manual_seed(0)
    made, table = provenance(), []
    for rows in map(int, options.rows.split(",")):
        found = measure(rows, options)
        table += [row | made for row in found]
        print("\n".join(map(line, found)), flush=True)
        write_rows(options.out, table)
    if any(row["us"] is None for row in table):
        sys.exit("A path is wrong somewhere.")


if __name__ == "__main__":
    main()
