"""How well adapters are placed on the replicas of a pool, what moves when replicas change, and how long a plan takes.

python -m tests.bench.bench_adapters [--traces FOLDER] [--minutes 60] [--only policies,movement,plan]

FOLDER has the clients of ServeGen m-mid (default: $SHOAL_TRACES). Without it that load is left out.
"""

import argparse
import os
import random
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shoal.api.demand import AdapterDemand
from shoal.core.lora.placement import Adapter, AdapterSignalSource, Limits, PoolSnapshot, Replica, Revision, place
from tests.bench import adapter_fleet, adapter_loads
from tests.bench.adapter_fleet import LRU, EverywhereLRU, FirstN, HomeLRU, Planned, Policy
from tests.bench.adapter_loads import Load
from tests.support.adapterpools import Pool, adapter, replica

CONSOLE = Console(width=140)
SLOTS = 8


def policies_table(load: Load, replicas: int, places: int) -> None:
    table = Table(
        title=f"{load.name}: {load.adapters} adapters, {len(load.requests)} requests, {replicas} replicas with {SLOTS} "
        f"slots and {places} places each"
    )
    for column in ("policy", "hit rate %", "loads/min", "added to TTFT: p50 ms", "p99 ms", "p99.9 ms", "CPU s"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    policies: tuple[Policy, ...] = (EverywhereLRU(), FirstN(), LRU(), HomeLRU(), Planned())
    for policy in policies:
        begun = time.process_time()
        found = adapter_fleet.play(load, policy, adapter_fleet.fleet(replicas, places, SLOTS))
        table.add_row(
            policy.name,
            f"{100 * found.hits:.2f}",
            f"{found.loads_per_minute:.1f}",
            *(f"{1000 * found.percentile(share):.1f}" for share in (0.5, 0.99, 0.999)),
            f"{time.process_time() - begun:.0f}",
        )
    best = adapter_fleet.belady(load, replicas * places)
    table.add_row("Belady, one cache of all places", f"{100 * best:.2f}", "", "", "", "", "")
    CONSOLE.print(table)


def policies_tables(folder: Path | None, minutes: float) -> None:
    for drifts in (False, True):
        policies_table(adapter_loads.zipf(2000, 40.0, 60 * minutes, 2.0, drifts=drifts), 20, 64)
    found = adapter_loads.clients(folder, 20.0, 24.0, 2.0) if folder else None
    if found is None:
        CONSOLE.print("ServeGen m-mid: not there; name its folder with --traces or SHOAL_TRACES")
    else:
        policies_table(found, 4, 16)
    CONSOLE.print(
        "A hit finds its adapter loaded at the replica to which it goes. A load takes 1.5 ms and what its bytes take\n"
        "at 2 GB/s, one after the other on a replica; ranks 8 to 64 of Llama-3.1-8B. Added to TTFT: waiting for a\n"
        "slot and for the load. Belady's is the hit rate of a single cache that knows the future."
    )


def movement_table() -> None:
    """2,000 adapters that are asked for alike on 20 replicas, of which one goes, and later one comes."""
    pool = Pool.of(20, limits=Limits(SLOTS, 160))
    for number in range(2000):
        pool.adapters[f"a{number}"] = adapter(f"a{number}", rank=(8, 16, 64)[number % 3])
    pool.step()
    pool.ask(*pool.adapters)
    pool.settle(120)
    table = Table(title="adapters whose home changed, 2,000 adapters with one copy each")
    for column in ("what happens", "moved", "had to move", "loads", "seconds until it rests"):
        table.add_column(column, justify="left" if column == "what happens" else "right")
    for what in ("a replica of 20 goes", "one comes to 19"):
        pool.ask(*pool.adapters)
        pool.step(5.0)
        before = pool.homes()
        pool.loads.clear()
        lost = 2000 // 20
        if what.startswith("a "):
            lost = sum("r7" in homes for homes in before.values())
            del pool.replicas["r7"]
        else:
            pool.replicas["r20"] = replica("r20")
        began, last = pool.now, pool.now
        for _ in range(100):
            if pool.step(5.0).moves:
                last = pool.now
        moved = sum(homes != before.get(uid) for uid, homes in pool.homes().items())
        table.add_row(what, str(moved), str(lost), str(len(pool.loads)), f"{last - began:.0f}")
    CONSOLE.print(table)


def plan_table(adapters: int = 20_000, replicas: int = 200, gateways: int = 8) -> None:
    table = Table(title=f"CPU of one plan: {adapters} adapters, {replicas} replicas, {gateways} gateways")
    for column in ("pool", "entries on floors", "ms"):
        table.add_column(column, justify="left" if column == "pool" else "right")
    draw = random.Random(1)  # noqa: S311 - the same load each time
    known = {
        f"a{i}": Adapter(f"a{i}", f"acme/a{i}", Revision(f"acme.a{i}@{i:012x}", 16, 84_000_000))
        for i in range(adapters)
    }
    there = tuple(Replica(f"r{i}", f"acme/r{i}", True, False, frozenset()) for i in range(replicas))
    silent = tuple(AdapterSignalSource(f"g{i}", "boot", {}) for i in range(gateways))
    seen = PoolSnapshot(Limits(SLOTS, 64), there, known, silent)

    def timed(what: str, now: float, seen: PoolSnapshot) -> None:
        nonlocal memory
        begun = time.process_time()
        plan, memory = place(seen, memory, now)
        took = time.process_time() - begun
        table.add_row(what, str(sum(map(len, plan.desired.values()))), f"{1000 * took:.0f}")

    memory = None
    timed("nobody was ever asked for", 0.0, seen)
    timed("the same again", 1.0, seen)
    said = {
        f"a{i}": AdapterDemand(model="m", arrivals=1 + adapters // (i + 1), in_flight=draw.random() < 300 / (i + 300))
        for i in range(adapters)
    }
    loaded = [set[str]() for _ in there]
    for i in range(adapters):
        if len(loaded[i % replicas]) < 60:
            loaded[i % replicas].add(f"acme.a{i}@{i:012x}")
    holding = tuple(replace(r, resident=frozenset(names)) for r, names in zip(there, loaded, strict=True))
    busy = replace(seen, replicas=holding, sources=tuple(replace(v, demand=said) for v in silent))
    memory = None
    timed("a new leader, host memory full, all asked for", 2.0, busy)
    timed("the same again", 400.0, busy)
    timed("the same again", 410.0, busy)
    timed("a replica goes", 415.0, replace(busy, replicas=busy.replicas[1:]))
    CONSOLE.print(table)


def main() -> None:
    where = os.environ.get("SHOAL_TRACES")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--traces", type=Path, default=Path(where) if where else None)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--only", default="policies,movement,plan")
    given = parser.parse_args()
    only = given.only.split(",")
    if "policies" in only:
        policies_tables(given.traces, given.minutes)
    if "movement" in only:
        movement_table()
    if "plan" in only:
        plan_table()


if __name__ == "__main__":
    main()
