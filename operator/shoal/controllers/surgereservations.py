"""GPUs promised to rollouts: for the one replica more that a Deployment has while it surges."""

from shoal.controllers.world import World
from shoal.core.placement import ClassSupply
from shoal.kube.projections import Child


class SurgeReservations:
    """A promise holds until the Deployment has rolled out, or is gone."""

    def __init__(self, world: World) -> None:
        self._reserved: dict[tuple[str, str], int] = {}
        """(Model's uid, class) -> GPUs."""
        world.deployments.listeners.append(self._deployment)

    def reserve(self, model_uid: str, gpu_class: str, gpus: int, supply: ClassSupply | None, planned: int) -> bool:
        """Whether the rollout may have one replica more. `asked`: GPUs of the class that replicas are about to take."""
        key = (model_uid, gpu_class)
        if key in self._reserved:
            return True
        if supply is None:
            return False
        taken = planned + self.reserved(gpu_class)
        free = [max(0, node.free) for node in supply.nodes]
        if max(free, default=0) < gpus or sum(amount // gpus * gpus for amount in free) - taken < gpus:
            return False
        self._reserved[key] = gpus
        return True

    def reserved(self, gpu_class: str) -> int:
        """GPUs of a class that rollouts may take."""
        return sum(amount for (_, name), amount in self._reserved.items() if name == gpu_class)

    def _deployment(self, _key: str, before: Child | None, after: Child | None) -> None:
        was, now = (child.deployment if child else None for child in (before, after))
        if was is not None and (now is None or now.rolled_out):
            self._reserved.pop((was.model_uid, was.gpu_class), None)
