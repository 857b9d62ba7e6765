"""Demand of many request sizes, to choose GPU classes for."""

import random

from shoal.core.placement.choice import Bucket, Offered

PRICES = (0.5, 0.9, 1.2, 1.86, 2.5, 3.67, 5.5, 7.5)
MEMORY_GB = (24, 24, 48, 48, 80, 80, 141, 192)


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
