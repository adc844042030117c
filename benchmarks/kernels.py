"""LoRA kernels alone: ours against stock vLLM's, taking turns, one CUDA graph over 32 layers x 4 modules each.

    python benchmarks/kernels.py --tune-stock --out kernels.csv                 # tests first, then the whole grid
    python benchmarks/kernels.py --points 8x16x128,24x8+16+64x128 --tune 8x16x128 --skip-tests

A point is adapters x rank x rows (kernel_points.py). Tests run first, and at each point and share of active rows every
path is held against float64 (one layer, all of its modules, the partial sums' memory poisoned); a path that is further
off than stock gets no time. Times are the device's: medians, p20 and p80 of graph replays that take turns.

Stock's grid is specialized to the adapters that are active. --tune-stock tries a few configurations of its kernels
through vLLM's own folder of tuned ones; if any is faster, it is measured everywhere as the path "stock, tuned", and
the better of the two stands for stock. With no active row vLLM launches no LoRA kernel at all, which the host knows
before the step; so at 0 % there is no time of stock, ours is timed, and no ratio counts. Without vLLM ours runs alone.

The CSV is written after each point. No point is started after --seconds; the ones left out are named at the end, and
--resume measures them in another run, beside the rows that --out already holds. The whole grid takes 30 GB and, on an
H200, three to four minutes.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from engines import provenance, run_tests, write_rows
from kernel_errors import errors, passing
from kernel_paths import Contestant, alternate, capture, has_stock, ours, spread, stock
from kernel_points import Module, Point, grid, make_model
from kernel_report import Row, header, lines, point_name, read, summary
from kernel_tuning import CHANGES, tune_stock

from lorazor.kernels.metadata import TileList

START = time.monotonic()


def our_paths(point: Point, listed: TileList, options: argparse.Namespace) -> dict[str, Contestant]:
    """Ours, and with --tune its other plans."""
    ranks = point.own_ranks().cuda() if len(point.ranks) > 1 else None
    found = {"ours": ours(listed, point.rows, ranks)}
    if point in options.tune:
        found |= {f"ours, {name}": ours(listed, point.rows, ranks, change) for name, change in CHANGES.items()}
    return found


def capture_all(contestants: dict[str, Contestant], model: list[Module]) -> dict[str, torch.cuda.CUDAGraph]:
    """Their graphs; another plan that is too large for the device is left out and named."""
    graphs = {}
    for name, contestant in contestants.items():
        try:
            graphs[name] = capture(contestant, model)
        except Exception as failure:
            if name == "ours":
                raise
            print(f"{name} cannot run: {type(failure).__name__}: {str(failure)[:80]}")
    return graphs


def measure(point: Point, options: argparse.Namespace, tuned: Path | None) -> list[Row]:
    """Rows of the table for one point: at every share, ours (and its other plans) beside stock."""
    model = make_model(point)
    listed = TileList(point.rows, point.adapters, "cuda")
    listed.build(point.slots(point.rows).cuda())
    mine = our_paths(point, listed, options)
    graphs = capture_all(mine, model)
    rows: list[Row] = []
    for active, share in point.actives(options.shares).items():
        slots = point.slots(active)
        listed.build(slots.cuda())
        contestants = {name: mine[name] for name in graphs}
        if options.stock and active:
            contestants["stock"] = stock(slots, point.adapters)
            if tuned:
                contestants["stock, tuned"] = stock(slots, point.adapters, tuned)
        found = errors(contestants, model, slots)
        replays = {name: graphs.get(name) or capture(contestants[name], model) for name in passing(found)}
        times = alternate({name: graph.replay for name, graph in replays.items()}, options.replays)
        where = {"adapters": point.adapters, "rank": point.rank_text, "rows": point.rows, "share": share}
        for name in contestants:
            row = {**where, "active": active, "path": name, **times.get(name, dict.fromkeys(("ms", "p20", "p80")))}
            rows.append(row | {"least_ms": point.least_ms(slots), "error": found[name]})
    return rows


def metadata(rows: int, max_loras: int) -> list[Row]:
    """Host and device time of one step's tile list, from slots on the device ("build") and on the host ("copy")."""
    listed = TileList(rows, max_loras, "cuda")
    host = Point(max_loras, (1,), rows).slots(rows // 2)
    device, array = host.cuda(), host.numpy()
    actions: dict[str, Callable[[], object]] = {
        "build": lambda: listed.build(device),
        "copy": lambda: listed.copy(array),
    }
    found = alternate(actions, 100)
    table = []
    for name, action in actions.items():
        spent = []
        for _ in range(100):
            torch.cuda.synchronize()
            start = time.perf_counter()
            action()
            spent.append((time.perf_counter() - start) * 1e3)
        for side, times in (("host", spread(spent)), ("device", found[name])):
            table.append({"adapters": max_loras, "rows": rows, "path": f"metadata {name}, {side}", **times})
    return table


def measure_all(options: argparse.Namespace, tuned: Path | None, listed: list[Row]) -> tuple[list[Row], list[Point]]:
    """The points in order, as many as the time allows, and those that failed.

    Each is printed and the CSV written when it is done, so that a killed run keeps what it has.
    """
    rows: list[Row] = read(options.out) if options.resume and options.out.exists() else []
    measured = {point_name(row) for row in rows}
    skipped: list[str] = []
    failed: list[Point] = []
    made = provenance()
    for point in (point for point in options.points if str(point) not in measured):
        if time.monotonic() - START > options.seconds:
            skipped.append(str(point))
            continue
        try:
            found = measure(point, options, tuned)
        except Exception:  # the other points are still worth their time
            traceback.print_exc(limit=-4, file=sys.stdout)
            print(f"{point} failed", flush=True)
            failed.append(point)
            torch.cuda.synchronize()  # raises again if nothing can run any more
            continue
        rows += [row | made for row in found]
        print(lines(found, options.shares), flush=True)
        write_rows(options.out, rows + [row | made for row in listed])
        torch.cuda.empty_cache()
    if skipped:
        print("left out for lack of time: " + ", ".join(skipped))
    return rows, failed


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", default=",".join(grid()), help="adapters x rank x rows, comma-separated")
    parser.add_argument("--shares", default="1,0.5,0.25,0.125,0.03,0", help="shares of active rows")
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=200.0, help="start no further point after this time")
    parser.add_argument("--out", type=Path, default=Path("kernels.csv"))
    parser.add_argument("--resume", action="store_true", help="keep what --out holds, measure the other points")
    parser.add_argument("--tune", default="", help="the points at which other plans of ours are timed too")
    parser.add_argument("--tune-stock", action="store_true", help="look for better configurations of stock first")
    parser.add_argument("--no-stock", dest="stock", action="store_false")
    parser.add_argument("--skip-tests", action="store_true")
    options = parser.parse_args()
    options.shares = [float(share) for share in options.shares.split(",")]
    options.points, options.tune = (
        [Point.parse(text) for text in given.split(",") if text] for given in (options.points, options.tune)
    )
    return options


def main() -> None:
    """Tests, the tile list, stock's tuning, then the points."""
    options = parse()
    if not options.skip_tests:
        run_tests()
    options.stock = options.stock and has_stock()
    torch.manual_seed(0)
    listed = metadata(256, 16)
    tuned = tune_stock() if options.stock and options.tune_stock else None
    print(header(options.shares))
    rows, failed = measure_all(options, tuned, listed)
    print(summary(rows, listed))
    print(f"{time.monotonic() - START:.0f} s")
    if failed or any(row["path"] == "ours" and row["ms"] is None for row in rows):
        sys.exit("Ours is wrong, or failed, somewhere.")


if __name__ == "__main__":
    main()
