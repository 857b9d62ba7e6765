"""A wake from zero, ahead of the plan: a request waits, and a plan of the whole fleet would take longer.

A class is chosen from what is free now, less what was promised since; the plan that follows reads it as asked for, and
may move it. Where nothing is free, or others wait for the same GPUs, the plan decides.
"""

from shoal.api.model import Model
from shoal.controllers.executor import Executor
from shoal.controllers.state import FleetState
from shoal.controllers.world import World
from shoal.core.placement import Candidate
from shoal.core.placement.modelplan import price
from shoal.kube.queue import WorkQueue


class Waker:
    """`begin` at the decision chooses the class and reserves its GPUs; `run` works off the queue."""

    def __init__(self, world: World, state: FleetState, executor: Executor, queue: WorkQueue) -> None:
        self._world, self._state, self._executor, self.queue = world, state, executor, queue
        self._classes: dict[str, str] = {}
        """Model's uid -> the class that it is about to wake on."""

    def begin(self, model: Model, wanted: int) -> bool:
        """Asks for the replicas of a Model that has none. False: the plan has to do it."""
        uid = model.metadata.uid
        request = self._state.record(uid).request
        if request is None or request.role != "placed" or uid in self._classes:
            return False
        candidate = self._choose(model, wanted)
        if candidate is None or self._world.deployment_of(uid, candidate.gpu_class) is None:
            return False
        free = self._state.free_slots(candidate.gpu_class, candidate.gpus)
        most = wanted if candidate.max_replicas is None else min(wanted, candidate.max_replicas)
        self._classes[uid] = candidate.gpu_class
        self._state.reserve_wake(uid, candidate.gpu_class, min(most, free), candidate.gpus)
        self.queue.add(uid)
        return True

    async def run(self) -> None:
        """Wakes until cancelled."""
        self._classes.clear()
        await self.queue.run(self._wake)

    async def _wake(self, uid: str) -> None:
        gpu_class = self._classes.get(uid)
        custom = self._world.model_by_uid(uid)
        try:
            if gpu_class is None or custom is None or custom.object is None:
                self._state.release_wake(uid)
            else:
                await self._executor.wake(custom.object, gpu_class)
        finally:
            self._classes.pop(uid, None)
            self._state.replan(hurry=True)

    def _choose(self, model: Model, wanted: int) -> Candidate | None:
        """The cheapest class that fits and has room now, where nobody else waits for it."""
        record = self._state.record(model.metadata.uid)
        interruptible = wanted * model.spec.interruptible_percent // 100
        for candidate in sorted(record.considered.candidates if record.considered else (), key=price):
            if candidate.gpu_class in record.backoffs:
                return None
            if candidate.max_replicas == 0 or (candidate.interruptible and interruptible < wanted):
                continue
            if self._state.contested(candidate.gpu_class):
                return None
            if self._state.free_slots(candidate.gpu_class, candidate.gpus):
                return candidate
        return None
