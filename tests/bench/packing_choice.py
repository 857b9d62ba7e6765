"""Class choice beside the optimum of an integer program (HiGHS): cost ratio and time."""

import time
from math import ceil

import highspy  # pyright: ignore[reportMissingImports]  # of the bench group

from shoal.core.placement.choice import Bucket, Offered, choose
from tests.support.demand import problem

SLICES = 8


def optimum(buckets: list[Bucket], classes: list[Offered], limit: float) -> tuple[float, float, float]:
    """(cost, proven bound, CPU seconds) of the integer program: slices of each bucket per class, replicas per class."""
    solver = highspy.Highs()
    solver.silent()
    for option, value in (("mip_rel_gap", 1e-3), ("time_limit", limit), ("threads", 1)):
        solver.setOptionValue(option, value)
    whole, infinite = highspy.HighsVarType.kInteger, highspy.kHighsInf
    replicas = {c.name: solver.addVariable(0, infinite, c.hourly_cost, whole) for c in classes}
    loads: dict[str, list] = {c.name: [] for c in classes}
    for bucket in buckets:
        shares = {name: solver.addVariable(0, SLICES, 0, whole) for name in bucket.load}
        solver.addConstr(highspy.Highs.qsum(shares.values()) == SLICES)  # pyright: ignore[reportArgumentType]
        for name, share in shares.items():
            loads[name].append(bucket.load[name] / SLICES * share)
    for name, parts in loads.items():
        if parts:
            solver.addConstr(sum(parts) - replicas[name] <= 0)
    begun = time.process_time()
    solver.run()
    seconds = time.process_time() - begun
    info = solver.getInfo()
    return info.objective_function_value, info.mip_dual_bound, seconds


def alone(buckets: list[Bucket], classes: list[Offered]) -> float:
    """Each bucket on the class where it costs least, whole replicas paid: what choosing without a search costs."""
    price = {c.name: c.hourly_cost for c in classes}
    load = dict.fromkeys(price, 0.0)
    for bucket in buckets:
        cheapest = min(bucket.load, key=lambda name: bucket.load[name] * price[name])
        load[cheapest] += bucket.load[cheapest]
    return sum(ceil(amount - 1e-9) * price[name] for name, amount in load.items())


def rows(seeds: int, limit: float) -> list[tuple[float, ...]]:
    """(replicas, seed, greedy / best, Shoal / best, best / bound, Shoal's CPU seconds, HiGHS's), `best` being the
    cheaper of HiGHS's and Shoal's: HiGHS stops at a gap of 0.1 %, so Shoal's may be the lower one."""
    found: list[tuple[float, ...]] = []
    for replicas in (20, 60, 300):
        for seed in range(seeds):
            buckets, classes = problem(seed, replicas)
            begun = time.process_time()
            ours = choose(buckets, classes, slices=SLICES).hourly_cost
            took = time.process_time() - begun
            cost, bound, seconds = optimum(buckets, classes, limit)
            best = min(cost, ours)
            found.append((replicas, seed, alone(buckets, classes) / best, ours / best, best / bound, took, seconds))
    return found
