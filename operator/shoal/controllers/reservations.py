"""GPUs between two plans: what was given away, and what is left for somebody who cannot wait for the next plan."""

from collections.abc import Iterable, Mapping

from shoal.controllers.capacity import FleetGPUs
from shoal.controllers.replicastates import ReplicaStates
from shoal.controllers.surgereservations import SurgeReservations
from shoal.core.placement import ClassSupply, Demand, Placement


class Reservations:
    """Counts in favour of those who were promised something: what it calls free is free."""

    def __init__(
        self, capacity: FleetGPUs, replica_states: ReplicaStates, surge_reservations: SurgeReservations
    ) -> None:
        self._capacity, self._replica_states, self._surge_reservations = capacity, replica_states, surge_reservations
        self._planned: dict[str, int] = {}
        """Class -> GPUs that the last plan gave to replicas which no node holds yet."""
        self._contested: frozenset[str] = frozenset()

    def planned(self, placements: Mapping[str, Placement], demands: Iterable[Demand]) -> None:
        """A plan was made: Model's uid -> its part."""
        self._planned = self._planned_gpus(placements)
        self._contested = frozenset(
            candidate.gpu_class
            for demand in demands
            if (placement := placements.get(demand.uid)) is not None and (placement.missing or placement.waiting)
            for candidate in demand.candidates
        )

    def free_slots(self, gpu_class: str, gpus: int) -> int:
        """Further replicas of so many GPUs that a class has room for now, beside what was asked for already."""
        taken = (
            self._planned.get(gpu_class, 0)
            + self._replica_states.reserved_gpus(gpu_class)
            + self._surge_reservations.reserved(gpu_class)
        )
        return max(0, self._capacity.slots(gpu_class, gpus) - -(-taken // gpus)) if gpus > 0 else 0

    def contested(self, gpu_class: str) -> bool:
        """Whether a Model waits for GPUs of the class: who gets them is decided over the whole fleet."""
        return gpu_class in self._contested

    def reserve_surge(
        self,
        model_uid: str,
        gpu_class: str,
        gpus: int,
        supply: ClassSupply | None,
        placements: Mapping[str, Placement],
    ) -> bool:
        """Promises the GPUs of one further replica to a rollout, if there are any that nobody waits for."""
        asked = self._planned_gpus(placements).get(gpu_class, 0)
        return self._surge_reservations.reserve(model_uid, gpu_class, gpus, supply, asked)

    def _planned_gpus(self, placements: Mapping[str, Placement]) -> dict[str, int]:
        """Class -> GPUs that were decided for replicas which no node holds yet."""
        found: dict[str, int] = {}
        for uid, placement in placements.items():
            for v in placement.variants:
                if v.replicas > v.waiting:
                    standing = self._replica_states.of(uid).get(v.gpu_class)
                    more = v.replicas - v.waiting - (standing.bound if standing else 0)
                    if more > 0:
                        found[v.gpu_class] = found.get(v.gpu_class, 0) + more * v.gpus
        return found
