"""ModelRoute: targets and names -> Accepted, Ready. Gateways do not wait for it: they read the specification."""

import asyncio
from collections.abc import Callable, Mapping

from shoal.api import names, reasons
from shoal.api.loraadapter import LoRAAdapter
from shoal.api.meta import Condition
from shoal.api.model import Model
from shoal.api.modelroute import ModelRoute, ModelRouteStatus
from shoal.api.tenant import Tenant
from shoal.controllers.claims import claimants, claims_changed, granted_otherwise, routes_claiming
from shoal.controllers.isolation import isolated, stored
from shoal.controllers.route.externalkeys import ExternalKeys
from shoal.controllers.status import write_status
from shoal.controllers.world import World
from shoal.core.routing.canary import CanaryHalt
from shoal.core.routing.routes import TargetRef, permits
from shoal.core.routing.servednames import served_names
from shoal.core.status import routestatus
from shoal.core.status.conditions import ConditionUpdate, find, merge
from shoal.core.status.routestatus import SeenRoute, SeenTarget
from shoal.kube.events import Event
from shoal.kube.projections import Custom
from shoal.kube.queue import WorkQueue
from shoal.kube.resources import MODEL_ROUTES


class RouteController:
    """Woken by its own objects, their targets, and those that claim the same names."""

    def __init__(
        self, world: World, queue: WorkQueue, halts: Callable[[], Mapping[str, CanaryHalt]] | None = None
    ) -> None:
        """`halts`: canaries that gateways have halted, by revision; None where no gateway reports. Call `enqueue_all`
        when they change."""
        self._world, self.queue, self._halts = world, queue, halts
        self.keys = ExternalKeys(world, self._wake)

    async def run(self) -> None:
        """Reconciles and delivers keys until cancelled. Only the leader runs it."""
        self.keys.begin_term()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.queue.run(self.reconcile))
            group.create_task(self.keys.run())

    def on_route(self, key: str, before: Custom[ModelRoute] | None, after: Custom[ModelRoute] | None) -> None:
        if after is not None:
            self.queue.add(key)
        self.keys.on_route(key, before, after)
        self._renamed(before, after)
        if before is None or after is None:
            self._wake_naming(key)  # a route that names a route

    def on_model(self, key: str, before: Custom[Model] | None, after: Custom[Model] | None) -> None:
        self._renamed(before, after)
        if _seen(before) != _seen(after):
            self._wake_naming(key)

    def on_adapter(self, key: str, before: Custom[LoRAAdapter] | None, after: Custom[LoRAAdapter] | None) -> None:
        self._renamed(before, after)
        if _seen(before) != _seen(after):
            self._wake_naming(key)

    def on_tenant(self, _key: str, before: Custom[Tenant] | None, after: Custom[Tenant] | None) -> None:
        """Objects that one tenant may use contend for names: with another grant the contenders differ."""
        if granted_otherwise(before, after) is not None:
            self.enqueue_all()

    def enqueue_all(self) -> None:
        """At the beginning of a term."""
        for key in self._world.routes.known_keys():
            self.queue.add(key)

    def _renamed(
        self,
        before: Custom[ModelRoute] | Custom[Model] | Custom[LoRAAdapter] | None,
        after: Custom[ModelRoute] | Custom[Model] | Custom[LoRAAdapter] | None,
    ) -> None:
        for contender in routes_claiming(self._world, claims_changed(before, after)):
            self.queue.add(contender)

    def _wake(self, key: str) -> None:
        self.queue.add(key)

    def _wake_naming(self, key: str) -> None:
        for custom in self._world.routes.by("target", key):
            self.queue.add(f"{custom.metadata.namespace}/{custom.metadata.name}")

    async def reconcile(self, key: str) -> float | None:
        """Returns None: nothing is looked at again without a reason."""
        world, manager = self._world, names.MANAGER_MODELROUTE
        return await isolated(world, MODEL_ROUTES, world.routes, key, self._reconcile, manager=manager)

    async def _reconcile(self, key: str) -> float | None:
        world = self._world
        custom = world.routes.get(key)
        if custom is None or custom.metadata.deletion_timestamp is not None:
            return None
        halted: list[str] = []
        if custom.object is None:
            status = _invalid(custom, world)
        else:
            route = custom.object
            targets = {ref: await self._target(ref, route) for ref in map(TargetRef._make, route.references())}
            halts = self._halts() if self._halts is not None else dict[str, CanaryHalt]()
            seen = SeenRoute(route, served_names(route, claimants(world, route)), targets, halts)
            status = routestatus.status(seen, world.now())
            halted = routestatus.new_halts(route, status)
        # A halt has its own event: another problem may be the reason of Ready, and another halt may have been it.
        quiet = (reasons.CANARY_HALTED,) if halted else ()
        manager = names.MANAGER_MODELROUTE
        if await write_status(world, MODEL_ROUTES, world.routes, custom, status, manager=manager, quiet=quiet):
            for note in halted:
                event = Event(MODEL_ROUTES, custom.metadata, "Warning", reasons.CANARY_HALTED, note, "Reconcile")
                world.recorder.emit(event)
        return None

    async def _target(self, ref: TargetRef, route: ModelRoute) -> SeenTarget:
        world, here = self._world, route.metadata.namespace or ""
        if ref.kind == "External":
            return await self._external(ref, route)
        custom = world.models.get(ref.key) if ref.kind == "Model" else world.adapters.get(ref.key)
        if custom is None or custom.metadata.deletion_timestamp is not None:
            if ref.namespace != here:
                return SeenTarget(exists=False, permitted=False)
            # A route may have the name of the Model that it is in front of.
            is_route = ref.key != route.key and world.routes.get(ref.key) is not None
            return SeenTarget(exists=False, is_route=is_route)
        if custom.object is None:
            return SeenTarget(permitted=ref.namespace == here, not_ready=reasons.INVALID)
        listed = frozenset(custom.object.spec.route_namespaces)
        conditions = custom.object.status.conditions if custom.object.status else ()
        return SeenTarget(permitted=permits(ref.namespace, listed, here), not_ready=_not_ready(conditions))

    async def _external(self, ref: TargetRef, route: ModelRoute) -> SeenTarget:
        declared = {route.external_key(one.name): one for one in route.spec.external_targets}
        if (target := declared.get(ref.key)) is None:
            return SeenTarget(exists=False)
        problem = await self.keys.problem(route, target)
        return SeenTarget(problem=problem, not_ready="" if problem is None else problem.reason)


def _not_ready(conditions: tuple[Condition, ...]) -> str:
    """The reason why an object cannot serve; "": it can. A Model without replicas can: the next request wakes it."""
    ready = find(conditions, reasons.READY)
    if ready is None:
        return reasons.PENDING
    available = find(conditions, reasons.AVAILABLE)
    if ready.status == "True" or (available is not None and available.status == "True"):
        return ""
    return ready.reason


def _seen(custom: Custom[Model] | Custom[LoRAAdapter] | None) -> tuple[object, ...]:
    """What a route's status says of a target."""
    if custom is None or custom.metadata.deletion_timestamp is not None:
        return ()
    if custom.object is None:
        return (reasons.INVALID,)
    conditions = custom.object.status.conditions if custom.object.status else ()
    return (custom.metadata.uid, custom.object.spec.route_namespaces, _not_ready(conditions))


def _invalid(custom: Custom[ModelRoute], world: World) -> ModelRouteStatus:
    message = f"what is stored does not pass this version's validation: {custom.error}"
    findings = [
        ConditionUpdate(reasons.ACCEPTED, "False", reasons.INVALID, message),
        ConditionUpdate(reasons.READY, "False", reasons.INVALID, message),
        ConditionUpdate(reasons.STALLED, "True", reasons.INVALID, message),
    ]
    old, generation = stored(ModelRouteStatus, custom), custom.metadata.generation
    conditions = merge(old.conditions, findings, generation=generation, now=world.now())
    return old.model_copy(update={"conditions": conditions, "observed_generation": generation})
