"""Brings a variant to its number: by `/scale`, or through KEDA where the Model says so; and from one to the other."""

import contextlib
from collections.abc import Callable, Iterable

import structlog

from shoal.api import names
from shoal.api.model import Model
from shoal.controllers.children import Children
from shoal.controllers.keda.answers import ScalerEndpoint
from shoal.controllers.keda.conditions import Conditions
from shoal.controllers.keda.observe import KEDAObserver, kinds
from shoal.controllers.keda.targets import Key, ScalerTargets
from shoal.controllers.scaling.observe import policy
from shoal.controllers.scaling.scale import ScaleWriter
from shoal.controllers.state import FleetState
from shoal.controllers.world import World
from shoal.core import children, facts
from shoal.core.keda import Autoscaler, bounds, ceilings
from shoal.kube.errors import Conflict, Forbidden, NotFound, ObjectInvalid, UnknownField
from shoal.kube.projections import Child, Custom
from shoal.kube.resources import CONFIGMAPS, SCALEDOBJECTS, TRIGGERAUTHENTICATIONS
from shoal.manifests import keda as manifests

log = structlog.get_logger()

Target = Callable[[], int]
"""Replicas that a Deployment shall have, asked right before they are written or answered."""


class Driver:
    """`scale` in place of a write of replicas. `run` while this operator leads; `watch` always."""

    def __init__(
        self,
        world: World,
        state: FleetState,
        scales: ScaleWriter,
        targets: ScalerTargets,
        endpoint: ScalerEndpoint,
        wake: Callable[[str], None],
    ) -> None:
        """`wake` hears the uid of a Model of which something else is to be said or done."""
        self._world, self._state, self._scales, self._endpoint, self._wake = world, state, scales, endpoint, wake
        self.targets = targets
        self.kinds = kinds(world)
        self._observer = KEDAObserver(world, self.targets, self.kinds)
        self.conditions = Conditions(world, self._observer, self.targets, endpoint, wake)
        self._children = Children(world)

    async def watch(self) -> None:
        """Follows KEDA's objects, where there are any, until cancelled."""
        await self.kinds.run()

    async def run(self) -> None:
        """Tells who has fallen silent, until cancelled."""
        await self.conditions.run()

    def begin(self) -> None:
        """A new term: nothing is answered before it is decided anew, and a ScaledObject that KEDA has not
        polled yet gets its time."""
        self.targets.begin()
        self._observer.begin()
        self.conditions.begin()
        self.compare()

    def drives(self, model: Model) -> bool:
        """KEDA is to write the Model's replicas."""
        return self._observer.driver(model) == "KEDA"

    # --- what is done -----------------------------------------------------------------------------------------------

    async def prepare(self, model: Model) -> None:
        """What a Model's ScaledObjects refer to; and what is left of it once nothing refers to it. Raises NameTaken."""
        uid, name, ca = model.metadata.uid, children.scaler_auth(model.metadata.name), self._authority()
        needed = self.drives(model) and ca != ""
        if self.drives(model):
            self.kinds.need()
        if needed and ca and self.kinds.installed:
            if self._state.record(uid).keda_ca != ca:
                wanted = manifests.certificate(model, ca)
                await self._children.is_free(CONFIGMAPS, model, wanted)
                await self._world.client.apply(CONFIGMAPS, wanted, manager=names.MANAGER_MODEL)
                self._state.record(uid).keda_ca = ca
            table = self._world.trigger_authentications
            await self._children.ensure(TRIGGERAUTHENTICATIONS, table, model, manifests.authentication(model))
            return
        left = self._world.trigger_authentications.get(f"{model.metadata.namespace}/{name}")
        if needed or left is None or left.model_uid != uid or self._observer.left(uid):
            return
        self._state.record(uid).keda_ca = None
        if "deletionTimestamp" in left.decode()["metadata"]:
            return  # KEDA's finalizer is on it
        await self._world.client.delete(CONFIGMAPS, name, model.metadata.namespace)
        with contextlib.suppress(Conflict):
            await self._world.client.delete(TRIGGERAUTHENTICATIONS, name, model.metadata.namespace, uid=left.uid)

    async def scale(self, model: Model, gpu_class: str, target: Target, *, floor: int = 0) -> None:
        """Brings a variant to its number, or lets it be brought there. Pods that go first are marked already. `floor`:
        its part of minReplicas.

        Raises Conflict, Unavailable as `ScaleWriter.scale`; NameTaken.
        """
        found = self._deployment_of(model, gpu_class)
        key, driver = (found.namespace, found.name), self._observer.driver(model)
        scaled = self._observer.scaled(key)
        if driver == "BuiltIn":
            if scaled is None and self._observer.hpa(key) is None:
                self.targets.drop(key)
                await self._scales.scale(model, gpu_class, target)
                return
            # KEDA is answered until it has let go, so that nothing moves meanwhile.
            self._answer(key, found, target)
            if scaled is not None and not scaled.deleting:
                await self._delete(scaled.uid, key)
            return
        known, number = self.targets.number(key), target()
        if known is not None and number > known:
            self._answer(key, found, target)  # up at once; down only when the bounds allow it
        if self.kinds.installed and (scaled is None or not scaled.deleting):
            await self._apply(model, found, number, floor)
        self._answer(key, found, target)
        if self._observer.writer(driver, found) == "Shoal":
            await self._scales.scale(model, gpu_class, target)

    def hold(self, model: Model) -> None:
        """Nothing is carried out of what is decided on the Model: it is paused, or not accepted. KEDA is answered what
        stands."""
        if not self.drives(model):
            return
        for child in self._world.deployments_of(model.metadata.uid):
            found = child.deployment
            if found is not None and self.targets.number((found.namespace, found.name)) is None:
                standing = found.replicas
                self._answer((found.namespace, found.name), found, lambda n=standing: n)

    async def raise_now(self, model: Model, gpu_class: str, target: Target) -> None:
        """From zero, ahead of the plan: KEDA is told at once, its ScaledObject follows with the plan. Raises as
        `scale`."""
        found = self._deployment_of(model, gpu_class)
        key, driver = (found.namespace, found.name), self._observer.driver(model)
        if driver == "KEDA" or self._observer.writer(driver, found) == "KEDA":
            self._answer(key, found, target)
        if self._observer.writer(driver, found) == "Shoal":
            await self._scales.scale(model, gpu_class, target)

    async def drop_variants(self, model: Model, keep: Iterable[str]) -> None:
        """Deletes ScaledObjects of classes that the Model does not use any more."""
        kept = set(keep)
        for child in self._observer.left(model.metadata.uid):
            if child.scaled is not None and child.scaled.gpu_class not in kept and not child.scaled.deleting:
                await self._delete(child.uid, (child.namespace, child.name))

    def compare(self) -> None:
        """Looks at everything once more that no watch tells of: somebody may have deleted it."""
        for _, record in self._state.records():
            record.keda_ca = None

    # --- how --------------------------------------------------------------------------------------------------------

    async def _apply(self, model: Model, found: facts.Deployment, number: int, floor: int) -> None:
        key, config = (found.namespace, found.name), self._world.config.scaling.keda
        ca = self._authority()
        if ca is None:
            return  # the condition tells why: KEDA would call a port that is closed
        hpa = self._observer.hpa(key)
        limits = bounds(
            number,
            floor=floor,
            ceiling=self._ceiling(model, found.gpu_class),
            existing=found.replicas,
            exact=hpa is not None and hpa.exact,
        )
        turn = self.conditions.reconnects(key)
        wanted = manifests.scaled_object(
            model, found.gpu_class, limits, config, self._world.namespace, ca=ca, reconnects=turn
        )
        wanted["metadata"]["name"] = wanted["spec"]["scaleTargetRef"]["name"] = found.name
        try:
            await self._children.ensure(SCALEDOBJECTS, self._world.scaled_objects, model, wanted)
        except NotFound:
            return  # KEDA is just being removed
        except (ObjectInvalid, Forbidden) as error:  # of admission, such as KEDA's own
            hint = "; KEDA 2.18 or later is needed" if isinstance(error, UnknownField) else ""
            self._observer.refused[key] = error.message + hint
            log.warning("the API server refuses a ScaledObject", model=model.key, error=error.message)
        else:
            self._observer.refused.pop(key, None)

    def _ceiling(self, model: Model, gpu_class: str) -> int:
        limits = {v.gpu_class: v.max_replicas for v in model.spec.variants}
        return ceilings(policy(model).maximum, {gpu_class: limits.get(gpu_class)})[gpu_class]

    def _authority(self) -> str | None:
        return self._endpoint.ca if self._world.config.scaling.keda.tls else ""

    async def _delete(self, uid: str, key: Key) -> None:
        # Not taken from the store: it may stay for as long as KEDA's finalizer is on it.
        with contextlib.suppress(Conflict):  # another one has the name meanwhile
            await self._world.client.delete(SCALEDOBJECTS, key[1], key[0], uid=uid)

    def _answer(self, key: Key, found: facts.Deployment, target: Target) -> None:
        self.targets.set(key, found.model_uid, found.gpu_class, found.gpus_per_replica, target())

    def _deployment_of(self, model: Model, gpu_class: str) -> facts.Deployment:
        live = self._scales.deployment(model, gpu_class)
        if live is None or live.deployment is None:
            raise Conflict(f"Deployment of {model.key} on {gpu_class} is gone again")
        return live.deployment

    # --- events -----------------------------------------------------------------------------------------------------

    def on_model(self, _key: str, before: Custom[Model] | None, after: Custom[Model] | None) -> None:
        if before is not None and (after is None or after.metadata.uid != before.metadata.uid):
            self.targets.drop_model(before.metadata.uid)
        if after is not None and after.object is not None and self.drives(after.object):
            self._endpoint.need()

    def on_deployment(self, _key: str, before: Child | None, after: Child | None) -> None:
        was, now = (bool(c and c.deployment and c.deployment.replicas) for c in (before, after))
        child = after or before
        if child is None:
            return
        key = (child.namespace, child.name)
        if after is None:
            self.targets.drop(key)
        elif was != now and self.targets.number(key) is not None:
            self.targets.notify(key)

    def on_scaled(self, _key: str, before: Child | None, after: Child | None) -> None:
        for child in (before, after):
            if child is not None:
                self.kinds.need()
                self._wake(child.model_uid)

    def on_autoscaler(self, _key: str, before: Autoscaler | None, after: Autoscaler | None) -> None:
        for hpa in (before, after):
            child = self._world.deployments.get(hpa.target_key) if hpa is not None else None
            if child is not None:
                self._wake(child.model_uid)
