"""A Model's minReplicas and maxReplicas over its variants: each variant has a ScaledObject with bounds of its own."""

from collections.abc import Mapping


def floors(minimum: int, planned: Mapping[str, int]) -> dict[str, int]:
    """Class -> its part of minReplicas: as many as were planned there, in the plan's order, until all are given. What
    the plan has no room for is nobody's part: no bound may ask for GPUs that the plan did not give."""
    left, found = minimum, dict[str, int]()
    for gpu_class, replicas in planned.items():
        found[gpu_class] = min(left, replicas)
        left -= found[gpu_class]
    return found


def ceilings(maximum: int, limits: Mapping[str, int | None]) -> dict[str, int]:
    """Class -> the most replicas that it can ever get: all of maxReplicas, or its own limit (None: it has none)."""
    return {name: max(1, maximum if limit is None else min(maximum, limit)) for name, limit in limits.items()}
