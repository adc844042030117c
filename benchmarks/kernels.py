"""LoRA kernels alone: ours against stock vLLM's, taking turns, one CUDA graph over 32 layers x 4 modules each.

    python benchmarks/kernels.py --out kernels.csv                    # tests first, then the default points
    python benchmarks/kernels.py --points 8x16x128,16x64x128 --tune 8x16x128 --skip-tests

A point is adapters x rank x rows. Tests run first, and at each point both paths are held against float64; a path that
is wrong gets no time. Without vLLM ours runs alone. The table comes last. Points that no longer fit into
--seconds are left out and named.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from kernel_paths import Contestant, alternate, capture, ours, stock
from kernel_points import MODULES, Module, Point, make_model

from lorazor.kernels.dispatch import add_lora
from lorazor.kernels.metadata import TileList
from lorazor.kernels.plan import Plan, plan_for
from lorazor.training.provenance import git_sha

POINTS = "8x16x128,16x64x128,32x16x128,4x16x2048,8x16x8,1x16x1,64x16x128,8x128x128,4x16x8192,32x8x256"
START = time.monotonic()


def error(contestant: Contestant, model: list[Module], tiles: torch.Tensor) -> float:
    """The largest error of one layer's modules against float64; infinite if an idle row changed."""
    rows = tiles[1 : 1 + int(tiles[0, 0]), 1:].flatten()
    idle = torch.ones(len(model[0].y), dtype=torch.bool, device="cuda")
    idle[rows[rows >= 0].long()] = False
    worst = 0.0
    for module in model[: len(MODULES)]:
        before, y = torch.randn_like(module.y), torch.empty_like(module.y)
        y.copy_(before)
        contestant(module, y)
        wide = [[w.double() for w in weights] for weights in (module.lora_a, module.lora_b)]
        exact = add_lora(before.double(), module.x.double(), wide[0], wide[1], tiles, path="reference")
        gap = float((y.double() - exact).norm() / exact.norm())
        worst = max(worst, gap if torch.equal(y[idle], before[idle]) and gap == gap else float("inf"))
    return worst


def variants(point: Point) -> dict[str, Callable[[Module], Plan]]:
    """Other plans to time with --tune, each changing one choice of the default."""

    def change(**fields: object) -> Callable[[Module], Plan]:
        def plan_of(module: Module) -> Plan:
            plan = plan_for(point.rows, module.x.shape[1], point.rank)
            given = {name: value(plan) if callable(value) else value for name, value in fields.items()}
            return dataclasses.replace(plan, **given)  # type: ignore[arg-type]

        return plan_of

    def half_chunk(plan: Plan) -> int:
        return plan.chunk // 2

    def double_chunk(plan: Plan) -> int:
        return plan.chunk * 2

    return {
        "pdl off": change(pdl=False),
        "chunk/2": change(chunk=half_chunk, block_k=lambda plan: min(plan.block_k, half_chunk(plan))),
        "chunk*2": change(chunk=double_chunk),
        "block_k/2": change(block_k=lambda plan: plan.block_k // 2),
        "shrink_rank/2": change(shrink_rank=lambda plan: max(16, plan.shrink_rank // 2)),
        "shrink 8 warps": change(shrink_warps=8),
        "stages 4": change(shrink_stages=4),
        "block_n/2": change(block_n=lambda plan: plan.block_n // 2),
        "block_n*2": change(block_n=lambda plan: plan.block_n * 2),
        "expand 8 warps": change(expand_warps=8),
    }


def measure(point: Point, shares: list[float], options: argparse.Namespace) -> list[dict[str, object]]:
    """Rows of the table for one point: every share, ours (and its variants) beside stock."""
    model = make_model(point.adapters, point.rank, point.rows)
    listed = TileList(point.rows, point.adapters, "cuda")
    listed.build(point.slots(1.0).cuda())
    plans: dict[str, Callable[[Module], Plan] | None] = {"ours": None}
    if point in options.tune:
        plans |= {f"ours, {name}": plan_of for name, plan_of in variants(point).items()}
    contestants = {name: ours(listed, point.rows, plan_of) for name, plan_of in plans.items()}
    graphs = {name: capture(contestant, model) for name, contestant in contestants.items()}
    rows = []
    for share in shares:
        slots = point.slots(share)
        listed.build(slots.cuda())
        tiles = listed.view(point.rows)
        errors = {name: error(contestant, model, tiles) for name, contestant in contestants.items()}
        actions: dict[str, Callable[[], object]] = {name: graph.replay for name, graph in graphs.items()}
        if options.stock and (slots >= 0).any():  # with no active row stock launches nothing
            theirs = stock(slots, point.adapters)
            errors["stock"] = error(theirs, model, tiles)
            actions["stock"] = capture(theirs, model).replay
        allowed = errors.get("stock", 0.0) * 1.02 + (1e-5 if "stock" in errors else 1e-2)
        good = {name: action for name, action in actions.items() if errors[name] <= allowed}
        times = alternate(good, options.replays)
        for name in actions:
            median, p20, p80 = times.get(name, (None, None, None))
            rows.append(
                {**dataclasses.asdict(point), "share": share, "path": name, "ms": median, "p20": p20, "p80": p80}
                | {"least_ms": point.least_ms(slots), "error": errors[name]}
            )
    return rows


def metadata(rows: int, max_loras: int) -> list[dict[str, object]]:
    """Host and device time of one step's tile list, by both builders."""
    listed = TileList(rows, max_loras, "cuda")
    host = Point(max_loras, 1, rows).slots(0.5)
    device, array = host.cuda(), host.numpy()
    actions = {"build": lambda: listed.build(device), "numpy": lambda: listed.copy(array)}
    found = alternate(actions, 200)
    table: list[dict[str, object]] = []
    for name, action in actions.items():
        spent = []
        for _ in range(200):
            torch.cuda.synchronize()
            start = time.perf_counter()
            action()
            spent.append((time.perf_counter() - start) * 1e3)
        table.append({"adapters": max_loras, "rows": rows, "path": f"metadata {name}, host", "ms": sorted(spent)[100]})
        table.append({"adapters": max_loras, "rows": rows, "path": f"metadata {name}, device", "ms": found[name][0]})
    return table


def provenance() -> dict[str, object]:
    """What every row of the CSV carries."""
    found: dict[str, object] = {"date": datetime.now(UTC).isoformat(timespec="seconds")}
    for package in ("torch", "triton", "vllm"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = ""
    # A copy without its git folder is told the revision.
    revision = os.environ.get("GIT_REVISION") or git_sha(Path(__file__).parent)
    return found | {"gpu": torch.cuda.get_device_name(), "argv": " ".join(sys.argv[1:]), "git": revision}


def write(path: Path, rows: list[dict[str, object]]) -> None:
    """All rows so far, replaced as a whole."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", newline="") as file:
        table = csv.DictWriter(file, names)
        table.writeheader()
        table.writerows(rows)
    os.replace(temporary, path)


def main() -> None:
    """Tests, then points in order, as many as the time allows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", default=POINTS, help="adapters x rank x rows, comma-separated")
    parser.add_argument("--shares", default="1,0.125,0", help="shares of active rows")
    parser.add_argument("--replays", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=140.0, help="start no further point after this time")
    parser.add_argument("--out", type=Path, default=Path("kernels.csv"))
    parser.add_argument("--tune", default="", help="the points at which other plans are timed too")
    parser.add_argument("--no-stock", dest="stock", action="store_false")
    parser.add_argument("--skip-tests", action="store_true")
    options = parser.parse_args()
    options.tune = [Point.parse(text) for text in options.tune.split(",") if text]
    if not options.skip_tests:
        tests = Path(__file__).parent.parent / "tests" / "kernels"
        command = [sys.executable, "-P", "-m", "pytest", "-q", "-x", "-m", "gpu", "-p", "no:cacheprovider", str(tests)]
        if subprocess.run(command, check=False).returncode:
            sys.exit("The kernels' tests fail: no speed is shown.")
    if options.stock:
        try:
            import vllm.lora.ops.triton_ops  # noqa: F401
        except ImportError as missing:
            print(f"stock is left out: {missing}")
            options.stock = False
    made, rows = provenance(), metadata(256, 16)
    for text in options.points.split(","):
        if time.monotonic() - START > options.seconds:
            print(f"no time left for {text}")
            continue
        try:
            rows += measure(Point.parse(text), [float(share) for share in options.shares.split(",")], options)
        except Exception:  # the other points are still worth their time
            traceback.print_exc()
        write(options.out, [row | made for row in rows])
        torch.cuda.empty_cache()
    for row in rows:
        print("  ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))
    print(f"{time.monotonic() - START:.0f} s")


if __name__ == "__main__":
    main()
