"""From a number of replicas to what the HPA is given, so that its arithmetic can land on nothing else.

The HPA compares metric / (target x replicas that exist) with 1 and does nothing within its tolerance: then it writes
the count of pods that exist, which for a moment is not what is asked for (a rollout surges, a pod is not made yet).
Outside it writes ceil(metric / target), within its bounds (k8s.io/kubernetes, replica_calculator.go,
GetExternalPerPodMetricReplicas; horizontal.go, reconcileAutoscaler).

Each variant has a ScaledObject with bounds of its own: `floors` and `ceilings` are a Model's minReplicas and
maxReplicas over its variants.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

TARGET: Final = 1.0
"""Constant: a new one would make KEDA rebuild the HPA."""
TOLERANCE: Final = 0.1
"""Of an HPA that has none of its own (kube-controller-manager's default)."""
INEXACT_FROM: Final = 10
"""With that tolerance there is a metric for each number below this one that tells it from its neighbours: it is above
1.1 x (n - 1), below 0.9 x (n + 1), and rounds up to n. From here on there is none, and the bounds have to do it."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """minReplicaCount and maxReplicaCount of a ScaledObject."""

    minimum: int
    maximum: int


def metric(replicas: int) -> float:
    """The metric for so many replicas at TARGET. Right with tolerance 0 for all numbers; with TOLERANCE below
    INEXACT_FROM."""
    if not 0 < replicas < INEXACT_FROM:
        return float(replicas)
    return min(float(replicas), (1 - TOLERANCE) * (replicas + 1) - 0.05)


def bounds(replicas: int, *, floor: int, ceiling: int, existing: int, exact: bool) -> Bounds:
    """Between what the HPA and KEDA may choose while `replicas` are decided.

    Never below one while any are wanted: KEDA takes a failed look for "nobody asks" in some races, and at a minimum of
    0 it then writes 0 from any number. Never below what stands: an HPA writes its maximum at once where more stand.
    `floor`, `ceiling`: this variant's part of the Model's bounds. `exact`: the HPA has tolerance 0.
    """
    if not replicas:
        return Bounds(0, max(1, ceiling, existing))
    if not exact and replicas >= INEXACT_FROM:
        return Bounds(replicas, replicas)
    return Bounds(max(1, min(floor, replicas)), max(ceiling, replicas, existing))


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
