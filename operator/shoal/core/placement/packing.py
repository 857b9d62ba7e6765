"""A whole fleet packed offline, with the operator's own planner."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal

from shoal.core.placement.plan import decide
from shoal.core.placement.room import Room
from shoal.core.placement.types import ClassSupply, Demand, Moves, Placement
from shoal.core.placement.words import Words


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
    """(namespace/name, replicas) that have no room or fit nowhere, in the order of precedence."""

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
    cases, rooms = decide((replace(d, standing={}, frozen=False) for d in demands), supplies, pace)
    words = Words(cases, rooms, pace)
    cost, unpriced = Decimal(0), 0
    for case in cases:
        for candidate in case.order:
            replicas = case.replicas(candidate.gpu_class)
            if candidate.hourly_cost is None:
                unpriced += replicas
            else:
                cost += candidate.hourly_cost * replicas
    return Packing(
        placements={case.demand.uid: words.placement(case) for case in cases},
        classes=tuple(_use(rooms[name]) for name in sorted(rooms)),
        hourly_cost=cost,
        unpriced=unpriced,
        missing=tuple((case.demand.key, case.missing) for case in cases if case.missing),
    )


def _use(room: Room) -> ClassUse:
    offered = sum(node.allocatable for node in room.supply.nodes)
    return ClassUse(room.supply.name, offered, offered - sum(room.free), room.most_free())
