"""A Model's key Secrets, PodDisruptionBudget, NetworkPolicy, ResourceClaimTemplates and Deployments."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import structlog

from shoal.api import names, reasons
from shoal.api.meta import JsonObject
from shoal.api.model import Model
from shoal.controllers.children.objects import Children, owner
from shoal.controllers.coldstarts import ColdStarts
from shoal.controllers.installkey import InstallKeys
from shoal.controllers.world import World
from shoal.core import children, facts
from shoal.core.disruption import min_available
from shoal.core.podquota import blocks_surge
from shoal.core.rollout import Beginning, no_node_came
from shoal.engine.kinds import KINDS, kind_of
from shoal.kube.drift import covers
from shoal.kube.errors import Conflict, NotFound
from shoal.kube.events import Event
from shoal.kube.projections import Child
from shoal.kube.resources import DEPLOYMENTS, MODELS, NETWORKPOLICIES, PDBS, RESOURCECLAIMTEMPLATES, SECRETS
from shoal.manifests import devices
from shoal.manifests import model as manifests
from shoal.manifests.shape import VariantShape

log = structlog.get_logger()

BeginRollout = Callable[[facts.Deployment], Beginning]
_REMEMBERED: Final = 20_000


class WorkloadWriter:
    """Server-side apply of whole objects as `shoal-model`. It never changes the replicas of a Deployment that another
    manager scales."""

    def __init__(self, world: World, cold: ColdStarts) -> None:
        self._world, self._cold = world, cold
        self._children = Children(world)
        self._secrets: OrderedDict[tuple[str, str], None] = OrderedDict()
        """(Model's uid, Secret's name) of key Secrets that were seen: their content cannot change."""

    def forget_secrets(self) -> None:
        """Checks every key Secret again at the next run: one may have been deleted."""
        self._secrets.clear()

    # --- the children -----------------------------------------------------------------------------------------------

    async def keys(self, model: Model, install: InstallKeys) -> None:
        """The key Secret of the current install key. Raises NameTaken."""
        suffix = kind_of(model).pod.keys_suffix
        seen = (model.metadata.uid, children.keys_secret(model.metadata.name, install.fingerprint, suffix))
        if seen in self._secrets:
            return
        wanted = manifests.keys_secret(model, install.current)
        if await self._children.is_free(SECRETS, model, wanted):
            await self._world.client.apply(SECRETS, wanted, manager=names.MANAGER_MODEL)
        self._secrets[seen] = None
        while len(self._secrets) > _REMEMBERED:
            self._secrets.popitem(last=False)

    async def drop_old_keys(self, model: Model, install: InstallKeys, in_use: set[str | None]) -> None:
        """Deletes the Secrets of other install keys once no pod carries them."""
        for old in install.former:
            if old.fingerprint not in in_use:
                for kind in KINDS.values():
                    await self._drop_keys(
                        model, children.keys_secret(model.metadata.name, old.fingerprint, kind.pod.keys_suffix)
                    )

    async def _drop_keys(self, model: Model, name: str) -> None:
        gone = (model.metadata.uid, f"{name} deleted")
        if gone in self._secrets:
            return
        try:
            found = await self._world.client.get_metadata(SECRETS, name, model.metadata.namespace)
        except NotFound:
            pass
        else:
            if owner(found) == model.metadata.uid:
                uid = found["metadata"]["uid"]
                await self._world.client.delete(SECRETS, name, model.metadata.namespace, uid=uid)
        self._secrets[gone] = None

    async def policies(self, model: Model, replicas: int, *, waits: bool) -> None:
        """PodDisruptionBudget and NetworkPolicy of a Model with so many `replicas`. `waits`: the only one that serves
        is not evicted before another one is ready. Raises NameTaken."""
        world, uid = self._world, model.metadata.uid
        live = next((child.decode() for child in world.budgets.by("model", uid)), None)
        former = None if live is None else manifests.ready_min_available(live)
        ready = sum(pod.ready and not pod.deleting for pod in world.pods.by("model", uid))
        budget = manifests.disruption_budget(model, min_available(former, ready, replicas), waits=waits)
        await self._children.ensure(PDBS, world.budgets, model, budget)
        if world.config.pods.network_policy:
            wanted = manifests.network_policy(model, world.config, world.namespace)
            await self._children.ensure(NETWORKPOLICIES, world.policies, model, wanted)
        else:
            for child in world.policies.by("model", uid):
                await self._children.delete(NETWORKPOLICIES, world.policies, child)

    async def deployment(self, shape: VariantShape, begin: BeginRollout) -> bool:
        """The Deployment of one class, without its replicas. `begin`: how a rollout of it begins. Returns whether one
        waits. Raises NameTaken, Conflict."""
        live = self._world.deployment_of(shape.model.metadata.uid, shape.gpu_class.metadata.name)
        return await self._update(shape, live or await self._create(shape), begin)

    async def claims(self, shape: VariantShape) -> None:
        """The ResourceClaimTemplate of a class whose GPUs are devices. Raises NameTaken."""
        wanted = devices.claim_template(shape)
        if wanted is not None:
            metadata, table = wanted["metadata"], self._world.claim_templates
            live = table.get(f"{metadata['namespace']}/{metadata['name']}")
            ours = live is not None and live.model_uid == shape.model.metadata.uid
            if live is not None and ours and devices.selectors(live.decode()) != devices.selectors(wanted):
                # Other devices are out of use than before. Pods that are made meanwhile wait for the new template.
                await self._children.delete(RESOURCECLAIMTEMPLATES, table, live)
            await self._children.ensure(RESOURCECLAIMTEMPLATES, self._world.claim_templates, shape.model, wanted)

    async def drop_old_claims(self, model: Model) -> None:
        """Deletes templates that no Deployment names. A rollout may still make pods of its older revision, so they stay
        until it is over."""
        table, uid = self._world.claim_templates, model.metadata.uid
        if not (templates := table.by("model", uid)):
            return
        named: set[str] = set()
        for child in self._world.deployments_of(uid):
            if child.deployment is None or child.deployment.replacing or not child.deployment.rolled_out:
                return
            claims: list[JsonObject] = child.decode()["spec"]["template"]["spec"].get("resourceClaims") or []
            named.update(str(each.get("resourceClaimTemplateName")) for each in claims)
        for template in templates:
            if template.name not in named and template.namespace == model.metadata.namespace:
                await self._children.delete(RESOURCECLAIMTEMPLATES, table, template)

    async def drop_variants(self, model: Model, keep: set[str]) -> None:
        """Deletes Deployments of classes that the Model does not use any more."""
        for child in self._world.deployments_of(model.metadata.uid):
            found = child.deployment
            if found is not None and found.gpu_class not in keep and not found.deleting:
                log.info("removing a variant", model=model.key, gpu_class=found.gpu_class)
                await self._children.delete(DEPLOYMENTS, self._world.deployments, child)

    # --- how --------------------------------------------------------------------------------------------------------

    async def _create(self, shape: VariantShape) -> Child:
        # An absent `replicas` would become 1: a pod before the scaler said so. Without force: should the Deployment be
        # there after all, with replicas that another manager owns, the 0 must not reach it.
        wanted = manifests.deployment(shape, surge=False, replicas=0)
        metadata, client, table = wanted["metadata"], self._world.client, self._world.deployments
        since = table.mark()
        if await self._children.is_free(DEPLOYMENTS, shape.model, wanted):
            answer = await client.apply(DEPLOYMENTS, wanted, manager=names.MANAGER_MODEL, force=False)
        else:
            answer = await client.get(DEPLOYMENTS, metadata["name"], metadata["namespace"])
        table.upsert(answer, since=since)
        live = self._world.deployment_of(shape.model.metadata.uid, shape.gpu_class.metadata.name)
        if live is None:
            raise Conflict(f"Deployment {metadata['namespace']}/{metadata['name']} is being deleted")
        return live

    async def _update(self, shape: VariantShape, live: Child, begin: BeginRollout) -> bool:
        found = live.deployment
        assert found is not None  # noqa: S101 - `deployment_of` returns no other
        spec = live.decode()["spec"]
        surge, deadline = found.surges, int(spec.get("progressDeadlineSeconds") or manifests.PROGRESS_SECONDS)
        wanted = manifests.deployment(shape, surge=surge, progress_seconds=deadline)
        wanted["metadata"]["name"] = live.name
        if not covers(spec["template"], wanted["spec"]["template"]):
            # A rollout begins: only now does it matter whether there is room for one more replica, and how long one
            # takes to start.
            if (beginning := begin(found)) == "wait":
                return True
            surge, deadline = beginning == "surge", round(self._cold.start_timeout(shape.model, found.gpu_class))
            wanted = manifests.deployment(shape, surge=surge, progress_seconds=deadline)
            wanted["metadata"]["name"] = live.name
            if found.replicas and not surge:
                self._emit_in_place(shape.model, found)
        elif found.surges and found.replacing and (why := self._cannot_surge(shape.model, found)):
            # The old replicas have the quota, or the GPUs, that the new one waits for.
            wanted = manifests.deployment(shape, surge=False, progress_seconds=deadline)
            wanted["metadata"]["name"] = live.name
            self._emit_in_place(shape.model, found, why)
        if found.replicas_managers == frozenset({names.MANAGER_MODEL}):
            # Nobody else owns the number yet, so leaving it out would drop it: it stays as it was read.
            wanted["spec"]["replicas"] = found.replicas
            wanted["metadata"]["resourceVersion"] = found.resource_version
        await self._children.ensure(DEPLOYMENTS, self._world.deployments, shape.model, wanted)
        return False

    def _cannot_surge(self, model: Model, found: facts.Deployment) -> str | None:
        """Why the replica more of a rollout does not come; None: it has come, or may come yet."""
        pods = [pod for pod in self._world.pods.by("model", model.metadata.uid) if pod.gpu_class == found.gpu_class]
        if blocks_surge(pods, found.refused):
            return "the quota has no room"
        if no_node_came(pods, self._cold.provision_seconds(found.gpu_class), self._world.now()):
            return f"no autoscaler added a node of {found.gpu_class}"
        return None

    def _emit_in_place(self, model: Model, found: facts.Deployment, why: str = "") -> None:
        note = (
            f"{why or f'no GPU of {found.gpu_class} is free'} for one replica more: each of {found.replicas} goes "
            "before its successor comes" + ("; requests wait meanwhile" if found.replicas == 1 else "")
        )
        event = Event(MODELS, model.metadata, "Normal", reasons.REPLACING_IN_PLACE, note, "Roll")
        self._world.recorder.emit(event)
