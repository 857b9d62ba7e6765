"""The Models that are to be reconciled."""

from shoal.controllers.world import World
from shoal.kube.queue import WorkQueue


class ModelQueue:
    """A queue of `namespace/name`. A change of a Model's state adds the Model."""

    def __init__(self, world: World, work: WorkQueue) -> None:
        self._world, self.work = world, work

    def add(self, key: str) -> None:
        """Something of the Model has changed."""
        self.work.add(key)

    def decided(self, key: str, delay: float) -> None:
        """Something was decided on the Model. `delay`: seconds after which it is early enough to reconcile it; 0:
        replicas are to come or go, so the Model waits behind no resync and behind no Model of which only a message
        changed."""
        if delay:
            self.work.add_after(key, delay)
        else:
            self.work.add(key, first=True)

    def add_uid(self, model_uid: str | None) -> None:
        """Something of the Model with this uid has changed; nothing where there is none."""
        custom = self._world.model_by_uid(model_uid)
        if custom is not None:
            self.add(f"{custom.metadata.namespace}/{custom.metadata.name}")
