"""`replicas` of Deployments, through `/scale`, and the deletion cost of pods that go first."""

from collections.abc import Callable
from functools import partial
from typing import Final

import structlog

from shoal.api import names
from shoal.api.meta import JsonObject
from shoal.api.model import Model
from shoal.controllers.replicastates import place
from shoal.controllers.world import World
from shoal.core import facts
from shoal.core.goesfirst import Loads, deletion_costs
from shoal.core.placement import VariantPlan
from shoal.kube.errors import APIServerUnavailable, Conflict, NotFound
from shoal.kube.resources import DEPLOYMENTS, PODS

log = structlog.get_logger()

_ATTEMPTS: Final = 5


class ScaleWriter:
    """Writes as `shoal-scaler`, always with the resourceVersion that was read."""

    def __init__(self, world: World, loads: Loads, leads: Callable[[], bool] = lambda: True) -> None:
        """`leads`: whether this process is sure to lead, asked right before each write. One that was stopped meanwhile
        would write what it once decided, over what its successor did."""
        self._world, self._loads, self._leads = world, loads, leads

    async def mark(self, model: Model, plan: VariantPlan) -> None:
        """Which pods of the variant go first when it shrinks; of none where all go: a write for each, and no choice."""
        if not plan.replicas:
            return
        pods = [p for p in self._world.pods.by("model", model.metadata.uid) if p.gpu_class == plan.gpu_class]
        where = partial(place, self._world)
        for change in deletion_costs(
            pods, dict(plan.leaving), dict(plan.forced), self._loads, where, dict(plan.others), plan.gpus
        ):
            log.info("replica.mark", pod=change.pod.key, cost=change.cost, why=change.why)
            await self._mark(change.pod, change.cost)

    async def scale(self, model: Model, gpu_class: str, target: Callable[[], int]) -> int:
        """Writes `replicas`: also the first 0, which makes the field the scaler's own. `target` is asked right before
        each write: a number that was decided while another write was on its way counts. Returns what stands.

        Raises Conflict when the Deployment is gone, or keeps changing; Unavailable when this process may lead no more.
        """
        client, table = self._world.client, self._world.deployments
        for _ in range(_ATTEMPTS):
            live = self._world.deployment_of(model.metadata.uid, gpu_class)
            found = live.deployment if live else None
            if found is None:
                raise Conflict(f"Deployment of {model.key} on {gpu_class} is gone again")
            replicas = target()
            if found.replicas == replicas and names.MANAGER_SCALER in found.replicas_managers:
                return replicas
            if not self._leads():
                raise APIServerUnavailable(
                    f"{found.key} is not scaled: it is not certain that this operator still leads"
                )
            try:
                await client.apply_scale(
                    DEPLOYMENTS,
                    found.name,
                    found.namespace,
                    replicas=replicas,
                    manager=names.MANAGER_SCALER,
                    resource_version=found.resource_version,
                )
            except Conflict:
                # The Deployment controller writes its status just now; read again, decide again.
                log.debug("scale met another write", deployment=found.key)
            since = table.mark()
            table.upsert(await client.get(DEPLOYMENTS, found.name, found.namespace), since=since)
        raise Conflict(f"Deployment of {model.key} on {gpu_class} keeps changing; trying again later")

    async def _mark(self, pod: facts.Pod, cost: int) -> None:
        annotations = {names.ANNOTATION_DELETION_COST: str(cost) if cost else None}
        body: JsonObject = {"metadata": {"uid": pod.uid, "annotations": annotations}}
        client, table = self._world.client, self._world.pods
        since = table.mark()
        try:
            # Not by apply, which would make a pod that is gone.
            answer = await client.merge_patch(PODS, pod.name, pod.namespace, body, manager=names.MANAGER_SCALER)
        except (NotFound, Conflict):
            return  # it is gone, or another pod has its name: nothing to choose any more
        table.upsert(answer, since=since)
