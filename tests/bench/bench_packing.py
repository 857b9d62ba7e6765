"""How well replicas are packed, and how long a plan takes.

python -m tests.bench.bench_packing [--traces FOLDER] [--seeds 10] [--only trace,plan]

FOLDER has openb/ (see packing_trace.py; default: $SHOAL_TRACES). Without it that table is left out.
"""

import argparse
import os
import random
import statistics
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shoal.core.placement import Candidate, ClassSupply, Demand, Held, NodeSupply, ReplicaState, plan
from tests.bench import packing_trace
from tests.support.fleets import candidate, demand

CONSOLE = Console(width=140)


def trace_table(folder: Path | None, seeds: int) -> None:
    if folder is None or not (folder / packing_trace.PODS).exists():
        CONSOLE.print("openb trace: not there; name its folder with --traces or SHOAL_TRACES")
        return
    trace = packing_trace.read(folder)
    said = packing_trace.published(folder)
    table = Table(title=f"GPU allocation % on 'openb default' at 130 % demand, {seeds} seeds")
    for column in ("rule", "mean", "sd", "over first-fit", "over FGD as published", "CPU s"):
        table.add_column(column, justify="left" if column == "rule" else "right")
    first: float | None = None
    for name, rule in packing_trace.rules(trace).items():
        begun = time.process_time()
        found = [packing_trace.allocation(trace, seed, rule) for seed in range(seeds)]
        mean, spread = statistics.mean(found), statistics.stdev(found) if len(found) > 1 else 0.0
        first = first or mean
        table.add_row(
            name,
            f"{mean:.2f}",
            f"{spread:.2f}",
            f"{mean / first:.4f}",
            f"{mean / said['FGD']:.4f}",
            f"{time.process_time() - begun:.0f}",
        )
    for name, value in said.items():
        table.add_row(f"{name}, as published", f"{value:.2f}", "", "", f"{value / said['FGD']:.4f}", "")
    CONSOLE.print(table)
    CONSOLE.print(
        "Compared is the choice of node and GPU by one measure of fragmentation. The trace shares GPUs and asks for\n"
        "CPU and memory: the harness adds these to the measure that the planner uses for whole GPUs. Arrivals are\n"
        "drawn by another generator than the published ones: 'this harness' is the like-for-like comparison."
    )


def plan_table() -> None:
    table = Table(title="one plan of a whole fleet, 8 classes x 100 nodes x 8 GPUs (goal: below 0.5 s)")
    for column in ("Models", "state", "CPU ms"):
        table.add_column(column, justify="right")
    for count in (1000, 5000):
        models, supplies = _fleet(count)
        fresh, placements = _timed(models, supplies)
        table.add_row(str(count), "all new", f"{fresh:.0f}")
        standing, left = _bound(models, placements, supplies)
        table.add_row(str(count), "all standing", f"{_timed(standing, left)[0]:.0f}")
        contenders = [
            demand(f"bench/x{i}", candidate("c0", 8, "8"), candidate("c7", 4, "60"), priority=99, age=9**6 + i)
            for i in range(100)
        ]
        table.add_row(str(count), "100 more of a higher priority", f"{_timed([*standing, *contenders], left)[0]:.0f}")
    CONSOLE.print(table)


def _timed(models: list[Demand], supplies: list[ClassSupply]) -> tuple[float, dict]:
    times: list[float] = []
    found: dict = {}
    for _ in range(3):
        begun = time.process_time()
        found = plan(models, supplies)
        times.append(1e3 * (time.process_time() - begun))
    return min(times), found


def _fleet(count: int) -> tuple[list[Demand], list[ClassSupply]]:
    draw = random.Random(1)  # noqa: S311
    models = [
        demand(
            f"bench/m{i:05}",
            *(candidate(f"c{c}", draw.choice([1, 1, 1, 2, 4]), str(1 + c)) for c in range(8)),
            age=i,
            priority=draw.choice([0, 0, 10]),
        )
        for i in range(count)
    ]
    return models, [ClassSupply(f"c{c}", tuple(NodeSupply(f"c{c}-{i:03}", 8, 8) for i in range(100))) for c in range(8)]


def _bound(
    models: list[Demand], placements: dict, supplies: list[ClassSupply]
) -> tuple[list[Demand], list[ClassSupply]]:
    """The plan as it stands when every pod is bound to the first node with room, and ready."""
    free = {n.name: n.free for s in supplies for n in s.nodes}
    nodes = {s.name: [n.name for n in s.nodes] for s in supplies}
    found: list[Demand] = []
    left: list[ClassSupply] = []
    for model in models:
        standing: dict[str, ReplicaState] = {}
        for variant in placements[model.uid].variants:
            on: dict[str, Held] = {}
            for _ in range(variant.replicas):
                node = next((n for n in nodes[variant.gpu_class] if free[n] >= variant.gpus), None)
                if node is not None:
                    free[node] -= variant.gpus
                    on[node] = Held(on[node].pods + 1, on[node].ready + 1) if node in on else Held(1, 1)
            pods = sum(h.pods for h in on.values())
            standing[variant.gpu_class] = ReplicaState(pods, variant.gpus, on, pods)
        candidates: list[Candidate] = list(model.candidates)
        found.append(demand(model.key, *candidates, priority=model.priority, standing=standing, created=model.created))
    left = [
        ClassSupply(s.name, tuple(NodeSupply(n.name, free[n.name], n.allocatable) for n in s.nodes)) for s in supplies
    ]
    return found, left


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = os.environ.get("SHOAL_TRACES")
    parser.add_argument("--traces", type=Path, default=Path(where) if where else None)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--only", default="plan,trace")
    options, _ = parser.parse_known_args()
    if "plan" in options.only:
        plan_table()
    if "trace" in options.only:
        trace_table(options.traces, options.seeds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
