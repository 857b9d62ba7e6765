"""Class choice beside the optimum of an integer program (HiGHS): cost ratio and time."""

import random
import time
from math import ceil

import highspy  # pyright: ignore[reportMissingImports]  # of the bench group

from shoal.core.placement.choice import Bucket, Offered, choose

PRICES = (0.5, 0.9, 1.2, 1.86, 2.5, 3.67, 5.5, 7.5)
MEMORY_GB = (24, 24, 48, 48, 80, 80, 141, 192)
SLICES = 8


def problem(seed: int, replicas: float, buckets: int = 100) -> tuple[list[Bucket], list[Offered]]:
    """Request sizes over two decades and eight classes: cheap ones are as good per coin for short requests, large ones
    for long requests. Made up, not measured; `replicas` is about how many the whole demand needs."""
    draw = random.Random(seed)  # noqa: S311
    power = [price * draw.uniform(0.7, 1.4) for price in PRICES]
    weights = [draw.lognormvariate(0, 1) for _ in range(buckets)]
    found: list[Bucket] = []
    for i, weight in enumerate(weights):
        context = 2 ** draw.uniform(8, 15)
        demand = 2 * replicas * weight / sum(weights)
        load: dict[str, float] = {}
        for g, memory in enumerate(MEMORY_GB):
            at_once = 1000 * memory / context
            if at_once >= 4:
                load[f"c{g}"] = demand / (power[g] * min(1, (at_once / 60) ** 0.5) * draw.uniform(0.8, 1.25))
        found.append(Bucket(f"b{i}", load or {f"c{len(PRICES) - 1}": demand / power[-1]}))
    return found, [Offered(f"c{g}", price) for g, price in enumerate(PRICES)]


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
