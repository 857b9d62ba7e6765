"""Brings a Model's children to what was decided, with as few writes as there are differences."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

import orjson
import structlog

from shoal.api import names, reasons
from shoal.api.meta import JsonObject
from shoal.api.model import Model
from shoal.controllers.coldstarts import ColdStarts
from shoal.controllers.installkey import InstallKeys
from shoal.controllers.scaling.scale import ScaleWriter
from shoal.controllers.world import World
from shoal.core import children, facts
from shoal.core.placement import VariantPlan
from shoal.kube.drift import covers
from shoal.kube.errors import Conflict, NotFound
from shoal.kube.events import Event
from shoal.kube.projections import Child
from shoal.kube.resources import DEPLOYMENTS, MODELS, NETWORKPOLICIES, PDBS, SECRETS, Resource
from shoal.kube.store import Table
from shoal.manifests import model as manifests
from shoal.manifests.shape import Shape

log = structlog.get_logger()

_REMEMBERED: Final = 20_000


class NameTaken(Exception):
    """An object of the name that Shoal needs exists and is not this Model's."""


class Applier:
    """Server-side apply of whole children as `shoal-model`, and of `replicas` alone as `shoal-scaler`."""

    def __init__(
        self, world: World, scales: ScaleWriter, cold: ColdStarts, target: Callable[[str, str, int], int]
    ) -> None:
        """`target`: of a Model's uid, a class and what was planned, how many replicas a Deployment shall have now."""
        self._world, self._scales, self._cold, self._target = world, scales, cold, target
        self._applied: OrderedDict[str, str] = OrderedDict()
        """Child's uid -> digest of what was last sent and of what stood there afterwards. Should the API server ever
        store something in another way than it was sent, it is sent once, not for ever."""
        self._secrets: OrderedDict[tuple[str, str], None] = OrderedDict()
        """(Model's uid, Secret's name) of key Secrets that were seen: their content cannot change."""

    def forget_secrets(self) -> None:
        """Looks at every key Secret once more: somebody may have deleted one."""
        self._secrets.clear()

    # --- the children -----------------------------------------------------------------------------------------------

    async def keys(self, model: Model, install: InstallKeys) -> None:
        """The key Secret of the current install key. Raises NameTaken."""
        wanted = manifests.keys_secret(model, install.current)
        seen = (model.metadata.uid, wanted["metadata"]["name"])
        if seen in self._secrets:
            return
        if await self._is_free(SECRETS, model, wanted):
            await self._world.client.apply(SECRETS, wanted, manager=names.MANAGER_MODEL)
        self._secrets[seen] = None
        while len(self._secrets) > _REMEMBERED:
            self._secrets.popitem(last=False)

    async def drop_old_keys(self, model: Model, install: InstallKeys, in_use: set[str | None]) -> None:
        """Deletes the Secret of the previous install key once no pod carries it."""
        old = install.old_fingerprint
        if old is None or old == install.fingerprint or old in in_use:
            return
        name = children.keys_secret(model.metadata.name, old)
        gone = (model.metadata.uid, f"{name} deleted")
        if gone in self._secrets:
            return
        try:
            found = await self._world.client.get_metadata(SECRETS, name, model.metadata.namespace)
        except NotFound:
            pass
        else:
            if _owner(found) == model.metadata.uid:
                uid = found["metadata"]["uid"]
                await self._world.client.delete(SECRETS, name, model.metadata.namespace, uid=uid)
        self._secrets[gone] = None

    async def policies(self, model: Model) -> None:
        """PodDisruptionBudget and NetworkPolicy. Raises NameTaken."""
        world = self._world
        await self._ensure(PDBS, world.budgets, model, manifests.disruption_budget(model))
        if world.config.pods.network_policy:
            wanted = manifests.network_policy(model, world.config, world.namespace)
            await self._ensure(NETWORKPOLICIES, world.policies, model, wanted)
        else:
            for child in world.policies.by("model", model.metadata.uid):
                await self._delete(NETWORKPOLICIES, world.policies, child)

    async def variant(self, shape: Shape, plan: VariantPlan, *, may_surge: Callable[[], bool]) -> None:
        """One Deployment: its fields, then its replicas. Raises NameTaken, Conflict."""
        live = self._scales.deployment(shape.model, plan.gpu_class) or await self._create(shape)
        await self._update(shape, live, may_surge=may_surge)
        await self.scale(shape.model, plan)

    async def scale(self, model: Model, plan: VariantPlan) -> None:
        """The replicas of a Deployment, and before them which of its pods go first. Raises Conflict."""
        await self._scales.mark(model, plan)
        uid = model.metadata.uid
        await self._scales.scale(model, plan.gpu_class, lambda: self._target(uid, plan.gpu_class, plan.replicas))

    async def drop_variants(self, model: Model, keep: set[str]) -> None:
        """Deletes Deployments of classes that the Model does not use any more."""
        for child in self._world.deployments.by("model", model.metadata.uid):
            found = child.deployment
            if found is not None and found.gpu_class not in keep and not found.deleting:
                log.info("removing a variant", model=model.key, gpu_class=found.gpu_class)
                await self._delete(DEPLOYMENTS, self._world.deployments, child)

    # --- how --------------------------------------------------------------------------------------------------------

    async def _create(self, shape: Shape) -> Child:
        # An absent `replicas` would become 1: a pod before the scaler said so. Without force: should the Deployment be
        # there after all, with replicas that somebody else owns, the 0 must not reach it.
        wanted = manifests.deployment(shape, surge=False, replicas=0)
        metadata, client, table = wanted["metadata"], self._world.client, self._world.deployments
        since = table.mark()
        if await self._is_free(DEPLOYMENTS, shape.model, wanted):
            answer = await client.apply(DEPLOYMENTS, wanted, manager=names.MANAGER_MODEL, force=False)
        else:
            answer = await client.get(DEPLOYMENTS, metadata["name"], metadata["namespace"])
        table.upsert(answer, since=since)
        live = self._scales.deployment(shape.model, shape.gpu_class.metadata.name)
        if live is None:
            raise Conflict(f"Deployment {metadata['namespace']}/{metadata['name']} is being deleted")
        return live

    async def _update(self, shape: Shape, live: Child, *, may_surge: Callable[[], bool]) -> None:
        found = live.deployment
        assert found is not None  # noqa: S101 - `_deployment` returns no other
        spec = live.decode()["spec"]
        surge, deadline = found.surges, int(spec.get("progressDeadlineSeconds") or manifests.PROGRESS_SECONDS)
        wanted = manifests.deployment(shape, surge=surge, progress_seconds=deadline)
        wanted["metadata"]["name"] = live.name
        if not covers(spec["template"], wanted["spec"]["template"]):
            # A rollout begins: only now does it matter whether there is room for one more replica, and how long one
            # takes to start.
            surge, deadline = may_surge(), round(self._cold.patience(shape.model, found.gpu_class))
            wanted = manifests.deployment(shape, surge=surge, progress_seconds=deadline)
            wanted["metadata"]["name"] = live.name
            if found.replicas and not surge:
                self._tell_in_place(shape.model, found)
        if found.replicas_managers <= {names.MANAGER_MODEL}:
            # Nobody else owns the number yet, so leaving it out would drop it: it stays as it was read.
            wanted["spec"]["replicas"] = found.replicas
            wanted["metadata"]["resourceVersion"] = found.resource_version
        await self._ensure(DEPLOYMENTS, self._world.deployments, shape.model, wanted)

    def _tell_in_place(self, model: Model, found: facts.Deployment) -> None:
        note = (
            f"no GPU of {found.gpu_class} is free for one replica more: each of {found.replicas} goes before its "
            "successor comes" + ("; requests wait meanwhile" if found.replicas == 1 else "")
        )
        event = Event(MODELS, model.metadata, "Normal", reasons.REPLACING_IN_PLACE, note, "Roll")
        self._world.recorder.emit(event)

    async def _ensure(self, resource: Resource, table: Table[Child], model: Model, wanted: JsonObject) -> None:
        metadata = wanted["metadata"]
        live = table.get(f"{metadata['namespace']}/{metadata['name']}")
        if live is not None and live.model_uid != model.metadata.uid:
            raise NameTaken(_taken(resource, metadata["name"], model))
        compared = _without_version(wanted)
        if live is None:
            await self._is_free(resource, model, wanted)
        elif covers(live.decode(), compared) or self._applied.get(live.uid) == _digest(compared, live):
            return
        since = table.mark()
        answer = await self._world.client.apply(resource, wanted, manager=names.MANAGER_MODEL)
        table.upsert(answer, since=since)
        stored = table.get(f"{metadata['namespace']}/{metadata['name']}")
        if stored is not None:
            self._applied[stored.uid] = _digest(compared, stored)
            while len(self._applied) > _REMEMBERED:
                self._applied.popitem(last=False)

    async def _is_free(self, resource: Resource, model: Model, wanted: JsonObject) -> bool:
        """True when no object has the name; False when this Model's own does. Raises NameTaken."""
        metadata = wanted["metadata"]
        try:
            found = await self._world.client.get_metadata(resource, metadata["name"], metadata["namespace"])
        except NotFound:
            return True
        if _owner(found) != model.metadata.uid:
            raise NameTaken(_taken(resource, metadata["name"], model))
        return False

    async def _delete(self, resource: Resource, table: Table[Child], child: Child) -> None:
        await self._world.client.delete(resource, child.name, child.namespace, uid=child.uid)
        table.remove(child.key, child.uid)


def current(deployments: tuple[Child, ...]) -> dict[str, facts.Deployment]:
    """A Model's Deployments by class."""
    return {d.gpu_class: d for c in deployments if (d := c.deployment) is not None and not d.deleting}


def _owner(found: JsonObject) -> str | None:
    owners: list[dict[str, Any]] = found["metadata"].get("ownerReferences") or []
    return next((o["uid"] for o in owners if o.get("controller")), None)


def _taken(resource: Resource, name: str, model: Model) -> str:
    return (
        f"{resource.kind} {model.metadata.namespace}/{name} exists and does not belong to this Model: "
        "rename or delete one of them"
    )


def _without_version(wanted: JsonObject) -> JsonObject:
    return wanted | {"metadata": {k: v for k, v in wanted["metadata"].items() if k != "resourceVersion"}}


def _digest(wanted: JsonObject, stored: Child) -> str:
    return hashlib.sha256(orjson.dumps(wanted) + stored.raw).hexdigest()
