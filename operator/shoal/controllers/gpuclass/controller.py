"""GPUClass: nodes and pods -> counts and Ready."""

from typing import Final

from shoal.api import names, reasons
from shoal.api.gpuclass import GPUClass, GPUClassStatus
from shoal.controllers.calibration import Calibration
from shoal.controllers.capacity import FleetGPUs
from shoal.controllers.isolation import isolated, stored
from shoal.controllers.status import write_status
from shoal.controllers.world import World
from shoal.core.status import gpuclassstatus
from shoal.core.status.conditions import ConditionUpdate, merge
from shoal.kube.projections import Custom
from shoal.kube.queue import WorkQueue
from shoal.kube.resources import GPUCLASSES

SETTLE_SECONDS: Final = 0.5
"""Pods come and go in bunches; the counts are written once per bunch."""


class GPUClassController:
    def __init__(self, world: World, capacity: FleetGPUs, calibration: Calibration, queue: WorkQueue):
        self._world, self._capacity, self._calibration, self.queue = world, capacity, calibration, queue

    def on_class(self, key: str, before: Custom[GPUClass] | None, after: Custom[GPUClass] | None) -> None:
        if after is not None:
            self.queue.add(key)
        if before is None or after is None or before.object is None or after.object is None:
            self.on_counts()
        elif before.object.spec.node_selector != after.object.spec.node_selector:
            self.on_counts()  # nodes may count for another class now

    def on_counts(self) -> None:
        for key in self._world.classes.known_keys():
            self.queue.add_after(key, SETTLE_SECONDS)

    def enqueue_all(self) -> None:
        for key in self._world.classes.known_keys():
            self.queue.add(key)

    async def reconcile(self, key: str) -> float | None:
        """Returns None: nothing is looked at again without a reason."""
        world = self._world
        return await isolated(world, GPUCLASSES, world.classes, key, self._reconcile, manager=names.MANAGER_GPUCLASS)

    async def _reconcile(self, key: str) -> float | None:
        custom = self._world.classes.get(key)
        if custom is None or custom.metadata.deletion_timestamp is not None:
            return None
        now = self._world.now()
        if custom.object is None:
            message = f"what is stored does not pass this version's validation: {custom.error}"
            finding = ConditionUpdate(reasons.READY, "False", reasons.INVALID, message)
            generation = custom.metadata.generation
            old = stored(GPUClassStatus, custom).conditions
            status = GPUClassStatus(
                conditions=merge(old, [finding], generation=generation, now=now), observed_generation=generation
            )
        else:
            gpu_class, name = custom.object, custom.metadata.name
            status = gpuclassstatus.status(
                gpu_class,
                self._capacity.usage(gpu_class),
                self._capacity.members().get(name, ()),
                overlapping=self._capacity.overlapping(gpu_class),
                overhead=self._calibration.overhead(name),
                now=now,
            )
        await write_status(self._world, GPUCLASSES, self._world.classes, custom, status, manager=names.MANAGER_GPUCLASS)
        return None
