"""From zero, ahead of the plan: somebody waits, and a plan of the whole fleet takes its time.

A class is chosen from what is free now, less what was promised since; the plan that follows reads it as asked for, and
may move it. Where nothing is free, or others wait for the same GPUs, the plan decides.
"""

import structlog

from shoal.api.model import Model
from shoal.controllers.keda.driver import Driver
from shoal.controllers.scaling.scale import ScaleWriter
from shoal.controllers.state import FleetState
from shoal.controllers.world import World
from shoal.core.placement import Candidate
from shoal.core.placement.modelplan import price
from shoal.kube.errors import KubeError
from shoal.kube.queue import WorkQueue

log = structlog.get_logger()


class Waker:
    """`begin` at the decision; `run` writes."""

    def __init__(self, world: World, state: FleetState, scales: ScaleWriter, driver: Driver, queue: WorkQueue) -> None:
        self._world, self._state, self._scales, self._driver = world, state, scales, driver
        self.queue = queue
        self._classes: dict[str, str] = {}
        """Model's uid -> the class that it is about to wake on."""

    def begin(self, model: Model, wanted: int) -> bool:
        """Asks for the replicas of a Model that has none. False: the plan has to do it."""
        uid = model.metadata.uid
        request = self._state.record(uid).request
        if request is None or request.role != "placed" or uid in self._classes:
            return False
        candidate = self._choose(model, wanted)
        if candidate is None or self._scales.deployment(model, candidate.gpu_class) is None:
            return False
        free = self._state.free_slots(candidate.gpu_class, candidate.gpus)
        most = wanted if candidate.max_replicas is None else min(wanted, candidate.max_replicas)
        self._classes[uid] = candidate.gpu_class
        self._state.reserve_wake(uid, candidate.gpu_class, min(most, free), candidate.gpus)
        self.queue.add(uid)
        return True

    async def run(self) -> None:
        """Writes until cancelled."""
        self._classes.clear()
        await self.queue.run(self._write)

    async def _write(self, uid: str) -> None:
        gpu_class = self._classes.get(uid)
        custom = self._world.model_by_uid(uid)
        try:
            if gpu_class is None or custom is None or custom.object is None:
                self._state.release_wake(uid)
                return
            await self._driver.raise_now(custom.object, gpu_class, lambda: self._state.target(uid, gpu_class, 0))
            self._state.wake_written(uid)
        except KubeError as error:
            log.warning("not woken at once; the plan does it", model=uid, gpu_class=gpu_class, error=error.message)
            self._state.release_wake(uid)
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
