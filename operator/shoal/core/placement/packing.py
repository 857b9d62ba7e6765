"""A whole fleet packed offline, with the operator's own planner."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal

from shoal.core.placement.classcapacity import ClassCapacity
from shoal.core.placement.messages import PlacementMessages
from shoal.core.placement.plan import decide
from shoal.core.placement.types import ClassSupply, Demand, Moves, Placement


@dataclass(frozen=True, slots=True)
class ClassUse:
    """What packing leaves of a class."""

    name: str
    gpus: int
    """That nodes offer which take pods."""
    allocated: int
    """Of these: what was held before, and what the Models get."""
    largest_free: int
    """Free GPUs of the node that has most."""


@dataclass(frozen=True, slots=True)
class Packing:
    placements: Mapping[str, Placement]
    """uid -> where its replicas go."""
    classes: tuple[ClassUse, ...]
    hourly_cost: Decimal
    """Of all replicas whose class has a price."""
    unpriced: int
    """Replicas on classes without a price."""
    missing: tuple[tuple[str, int], ...]
    """(namespace/name, replicas) that have no capacity or fit nowhere, in the order of precedence."""

    @property
    def gpus(self) -> int:
        return sum(c.gpus for c in self.classes)

    @property
    def allocated(self) -> int:
        return sum(c.allocated for c in self.classes)

    @property
    def allocation_percent(self) -> float:
        """GPUs allocated of those offered; 0 where none are offered."""
        return 100 * self.allocated / self.gpus if self.gpus else 0.0


def pack(demands: Iterable[Demand], supplies: Iterable[ClassSupply]) -> Packing:
    """Places every Model as if none of it stood: what a new cluster would look like. GPUs that are not free in the
    supplies stay taken."""
    pace = Moves(in_flight=0)
    plans, capacities = decide((replace(d, replica_states={}, frozen=False) for d in demands), supplies, pace)
    messages = PlacementMessages(plans, capacities, pace)
    cost, unpriced = Decimal(0), 0
    for plan in plans:
        for candidate in plan.order:
            replicas = plan.replicas(candidate.gpu_class)
            if candidate.hourly_cost is None:
                unpriced += replicas
            else:
                cost += candidate.hourly_cost * replicas
    return Packing(
        placements={plan.demand.uid: messages.placement(plan) for plan in plans},
        classes=tuple(_use(capacities[name]) for name in sorted(capacities)),
        hourly_cost=cost,
        unpriced=unpriced,
        missing=tuple((plan.demand.key, plan.missing) for plan in plans if plan.missing),
    )


def _use(capacity: ClassCapacity) -> ClassUse:
    offered = sum(node.allocatable for node in capacity.supply.nodes)
    return ClassUse(capacity.supply.name, offered, offered - sum(capacity.free), capacity.most_free())
