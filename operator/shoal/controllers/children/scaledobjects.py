"""How a Deployment comes to its replicas: through `/scale`, or through KEDA where the Model says so; and the step from
one to the other. Also the objects of KEDA that this needs: ScaledObjects, TriggerAuthentications, ConfigMaps."""

import contextlib
from collections.abc import Iterable

import structlog

from shoal.api import names
from shoal.api.model import Model
from shoal.controllers.children.objects import Children
from shoal.controllers.children.replicas import ScaleWriter
from shoal.controllers.keda.driver import Driver, Target
from shoal.controllers.keda.targets import Key
from shoal.controllers.scaling.observe import policy
from shoal.controllers.state import FleetState
from shoal.controllers.world import World
from shoal.core import children, facts
from shoal.core.keda import bounds, ceilings
from shoal.kube.errors import Conflict, Forbidden, NotFound, ObjectInvalid, UnknownField
from shoal.kube.resources import CONFIGMAPS, SCALEDOBJECTS, TRIGGERAUTHENTICATIONS
from shoal.manifests import keda as manifests

log = structlog.get_logger()


class ScaledObjectWriter:
    """Writes KEDA's objects as `shoal-model`. It tells KEDA a number (`Driver.answer`) only when the number may be
    carried out."""

    def __init__(self, world: World, state: FleetState, scales: ScaleWriter, driver: Driver) -> None:
        self._world, self._state, self._scales, self._driver = world, state, scales, driver
        self._children = Children(world)

    def forget_certificates(self) -> None:
        """Checks every ConfigMap again at the next run: no watch reports a deleted one."""
        for _, record in self._state.records():
            record.keda_ca = None

    async def prepare(self, model: Model) -> None:
        """What a Model's ScaledObjects refer to; and what is left of it once nothing refers to it. Raises NameTaken."""
        uid, name, ca = model.metadata.uid, children.scaler_auth(model.metadata.name), self._driver.ca
        needed = self._driver.drives(model) and ca != ""
        if self._driver.drives(model):
            self._driver.kinds.need()
        if needed and ca and self._driver.kinds.installed:
            if self._state.record(uid).keda_ca != ca:
                wanted = manifests.certificate(model, ca)
                await self._children.is_free(CONFIGMAPS, model, wanted)
                await self._world.client.apply(CONFIGMAPS, wanted, manager=names.MANAGER_MODEL)
                self._state.record(uid).keda_ca = ca
            table = self._world.trigger_authentications
            await self._children.ensure(TRIGGERAUTHENTICATIONS, table, model, manifests.authentication(model))
            return
        left = self._world.trigger_authentications.get(f"{model.metadata.namespace}/{name}")
        if needed or left is None or left.model_uid != uid or self._driver.observer.left(uid):
            return
        self._state.record(uid).keda_ca = None
        if "deletionTimestamp" in left.decode()["metadata"]:
            return  # KEDA's finalizer is on it
        await self._world.client.delete(CONFIGMAPS, name, model.metadata.namespace)
        with contextlib.suppress(Conflict):
            await self._world.client.delete(TRIGGERAUTHENTICATIONS, name, model.metadata.namespace, uid=left.uid)

    async def scale(self, model: Model, gpu_class: str, target: Target, *, floor: int = 0) -> None:
        """Brings a variant with which KEDA has something to do (`Driver.is_out`) to its number, or lets KEDA do it.
        Pods that go first are marked already. `floor`: its part of minReplicas.

        Raises Conflict, Unavailable as `ScaleWriter.scale`; NameTaken.
        """
        found = self._deployment_of(model, gpu_class)
        key, driver = (found.namespace, found.name), self._driver.observer.driver(model)
        scaled = self._driver.observer.scaled(key)
        if driver == "BuiltIn":
            # KEDA is answered until it has let go, so that nothing moves meanwhile.
            self._driver.answer(key, found, target)
            if scaled is not None and not scaled.deleting:
                await self._delete(scaled.uid, key)
            return
        known, number = self._driver.targets.number(key), target()
        if known is not None and number > known:
            self._driver.answer(key, found, target)  # up at once; down only when the bounds allow it
        if self._driver.kinds.installed and (scaled is None or not scaled.deleting):
            await self._apply(model, found, number, floor)
        self._driver.answer(key, found, target)
        if self._driver.observer.writer(driver, found) == "Shoal":
            await self._scales.scale(model, gpu_class, target)

    async def wake(self, model: Model, gpu_class: str, target: Target) -> None:
        """Wakes a Model from zero, ahead of the plan: the number is pushed to KEDA at once. The ScaledObject follows
        with the plan. Raises as `scale`."""
        found = self._deployment_of(model, gpu_class)
        key, driver = (found.namespace, found.name), self._driver.observer.driver(model)
        if driver == "KEDA" or self._driver.observer.writer(driver, found) == "KEDA":
            self._driver.answer(key, found, target)
        if self._driver.observer.writer(driver, found) == "Shoal":
            await self._scales.scale(model, gpu_class, target)

    async def drop_variants(self, model: Model, keep: Iterable[str]) -> None:
        """Deletes ScaledObjects of classes that the Model does not use any more."""
        kept = set(keep)
        for child in self._driver.observer.left(model.metadata.uid):
            if child.scaled is not None and child.scaled.gpu_class not in kept and not child.scaled.deleting:
                await self._delete(child.uid, (child.namespace, child.name))

    # --- how --------------------------------------------------------------------------------------------------------

    async def _apply(self, model: Model, found: facts.Deployment, number: int, floor: int) -> None:
        key, config = (found.namespace, found.name), self._world.config.scaling.keda
        ca = self._driver.ca
        if ca is None:
            return  # the condition tells why: KEDA would call a port that is closed
        hpa = self._driver.observer.hpa(key)
        limits = bounds(
            number,
            floor=floor,
            ceiling=self._ceiling(model, found.gpu_class),
            existing=found.replicas,
            exact=hpa is not None and hpa.exact,
        )
        turn = self._driver.conditions.reconnects(key)
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
            self._driver.observer.refused[key] = error.message + hint
            log.warning("the API server refuses a ScaledObject", model=model.key, error=error.message)
        else:
            self._driver.observer.refused.pop(key, None)

    def _ceiling(self, model: Model, gpu_class: str) -> int:
        limits = {v.gpu_class: v.max_replicas for v in model.spec.variants}
        return ceilings(policy(model).maximum, {gpu_class: limits.get(gpu_class)})[gpu_class]

    async def _delete(self, uid: str, key: Key) -> None:
        # Not taken from the store: it may stay for as long as KEDA's finalizer is on it.
        with contextlib.suppress(Conflict):  # another one has the name meanwhile
            await self._world.client.delete(SCALEDOBJECTS, key[1], key[0], uid=uid)

    def _deployment_of(self, model: Model, gpu_class: str) -> facts.Deployment:
        live = self._world.deployment_of(model.metadata.uid, gpu_class)
        if live is None or live.deployment is None:
            raise Conflict(f"Deployment of {model.key} on {gpu_class} is gone again")
        return live.deployment
