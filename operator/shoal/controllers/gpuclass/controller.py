"""GPUClass: nodes and pods -> counts and Ready."""

import time
from typing import Final

from shoal.api import names, reasons
from shoal.api.gpuclass import GPUClass, GPUClassStatus
from shoal.controllers.calibration import Calibration
from shoal.controllers.capacity import FleetGPUs
from shoal.controllers.coldstarts import ColdStarts
from shoal.controllers.consolidation import FleetConsolidation
from shoal.controllers.devices import FIRST_LIST_SECONDS
from shoal.controllers.health import ClassHealth, FleetHealth
from shoal.controllers.isolation import isolated, stored
from shoal.controllers.state import FleetState
from shoal.controllers.status import write_status
from shoal.controllers.world import World
from shoal.core import facts
from shoal.core.status import devicestatus, gpuclassstatus, healthstatus
from shoal.core.status.conditions import ConditionUpdate, merge
from shoal.kube.optional import OptionalKinds
from shoal.kube.projections import Custom
from shoal.kube.queue import WorkQueue
from shoal.kube.resources import GPUCLASSES

RETRY_SECONDS: Final = 2.0
SETTLE_SECONDS: Final = 0.5
"""Pods come and go in bunches; the counts are written once per bunch."""


class GPUClassController:
    def __init__(
        self,
        world: World,
        capacity: FleetGPUs,
        calibration: Calibration,
        cold: ColdStarts,
        dra: OptionalKinds,
        queue: WorkQueue,
        *,
        consolidation: FleetConsolidation,
        state: FleetState,
    ) -> None:
        """`dra`: the kinds of dynamic resource allocation, which are needed once a class has a `device`."""
        self._world, self._capacity, self._calibration, self.queue = world, capacity, calibration, queue
        self._cold, self._dra, self._state = cold, dra, state
        self.health = FleetHealth(world, capacity)
        self._consolidation = consolidation
        self._waits_since: float | None = None

    def begin_term(self) -> None:
        """What was seen before, perhaps long ago, is no evidence."""
        self.health.begin_term()
        self._consolidation.begin_term()

    def on_class(self, key: str, before: Custom[GPUClass] | None, after: Custom[GPUClass] | None) -> None:
        if before is not None and after is None:
            self.queue.add(key)  # its labels on nodes go
            live = {c.metadata.uid for c in self._world.classes.values()}
            self.health.forget(live)
            self._consolidation.forget(live)
        if after is not None:
            self.queue.add(key)
            if after.object is not None and after.object.spec.device is not None:
                self._dra.need()
        if before is None or after is None or before.object is None or after.object is None:
            self.on_counts()
        elif (before.object.spec.node_selector, before.object.spec.device) != (
            after.object.spec.node_selector,
            after.object.spec.device,
        ):
            self.on_counts()  # nodes or devices may count for another class now

    def on_pod(self, _key: str, before: facts.Pod | None, after: facts.Pod | None) -> None:
        """A replica without a node may need the node that is being emptied, before an autoscaler adds one. One that
        turned ready may have waited for a new node."""
        if after is None or after.gpu_class is None or after.model_uid is None:
            return
        custom = self._world.classes.get(after.gpu_class)
        found = custom.object if custom is not None else None
        if found is None or found.spec.nodes.autoscaled is None:
            return
        turned_ready = after.ready and before is not None and not before.ready
        emptying = found.status is not None and found.status.consolidation is not None
        if turned_ready or (emptying and after.node is None):
            self.queue.add(after.gpu_class)

    def on_counts(self) -> None:
        for key in self._world.classes.known_keys():
            self.queue.add_after(key, SETTLE_SECONDS)

    def enqueue_all(self) -> None:
        # A class may have been deleted while no operator ran: its labels on nodes go.
        for key in {*self._world.classes.known_keys(), *self.health.labelled()}:
            self.queue.add(key)

    async def reconcile(self, key: str) -> float | None:
        """Returns seconds after which it is looked at again without a reason: devices that are not listed yet, signals
        that have not lasted yet, quarantines that end, nodes that may be emptied."""
        world = self._world
        return await isolated(world, GPUCLASSES, world.classes, key, self._reconcile, manager=names.MANAGER_GPUCLASS)

    async def _reconcile(self, key: str) -> float | None:
        custom = self._world.classes.get(key)
        if custom is None or custom.metadata.deletion_timestamp is not None:
            await self.health.label(key, None)
            return None
        now = self._world.now()
        found: ClassHealth | None = None
        emptied, recheck = None, None
        if custom.object is None:
            message = f"what is stored does not pass this version's validation: {custom.error}"
            finding = ConditionUpdate(reasons.READY, "False", reasons.INVALID, message)
            generation = custom.metadata.generation
            old = stored(GPUClassStatus, custom)
            status = GPUClassStatus(
                conditions=merge(old.conditions, [finding], generation=generation, now=now),
                observed_generation=generation,
                provision_seconds=old.provision_seconds,
            )
        else:
            gpu_class, name = custom.object, custom.metadata.name
            unavailable = self._unavailable(gpu_class)
            if unavailable is not None and unavailable.reason == reasons.PENDING and not self._waited():
                return RETRY_SECONDS
            devices = self._capacity.devices
            found = self.health.decide(gpu_class)
            recheck = found.plan.recheck_seconds
            consolidation = await self._consolidation.reconcile(gpu_class, found.plan, self.health)
            emptied, again = consolidation.emptied, consolidation.recheck_seconds
            recheck = min((each for each in (recheck, again) if each is not None), default=None)
            status = gpuclassstatus.status(
                gpu_class,
                self._capacity.usage(gpu_class),
                self._capacity.members().get(name, ()),
                overlapping=self._capacity.overlapping(gpu_class),
                twice=self._capacity.counted_twice(gpu_class),
                overhead=self._calibration.overhead(name),
                now=now,
                devices=devices.classes().get(name) if gpu_class.spec.device is not None else None,
                facts=devices.facts().get(name) if gpu_class.spec.device is not None else None,
                unavailable=unavailable,
                quarantined=healthstatus.shown(found.plan.quarantined, found.uuids),
                health=healthstatus.condition(found.plan, found.problems, found.unmeasured),
                consolidation=emptied,
                consolidating=consolidation.condition,
                node_wait=self._cold.node_wait(name),
                outage=self._state.outages.get(name),
            )
        await write_status(self._world, GPUCLASSES, self._world.classes, custom, status, manager=names.MANAGER_GPUCLASS)
        waits = custom.object is not None and self._unavailable(custom.object) is not None
        node = emptied.node if emptied is not None else None
        refused = await self.health.label(key, found.plan, node) if found is not None else False
        if waits or refused:
            return RETRY_SECONDS
        return recheck

    def _unavailable(self, gpu_class: GPUClass) -> ConditionUpdate | None:
        """Why there are no devices in this cluster; None: there may be, or the class needs none."""
        if gpu_class.spec.device is None or self._dra.complete:
            self._waits_since = None
            return None
        return devicestatus.unavailable(served=self._dra.installed is not False)

    def _waited(self) -> bool:
        """Devices have been listed for longer than a restart takes: until then a class's status stays as it was."""
        now = time.monotonic()
        if self._waits_since is None:
            self._waits_since = now
        return now - self._waits_since > FIRST_LIST_SECONDS
