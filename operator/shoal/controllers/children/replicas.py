"""`replicas` of Deployments, through `/scale`, and the deletion cost of pods that go first."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final

import structlog

from shoal.api import names
from shoal.api.meta import JsonObject
from shoal.api.model import Model
from shoal.controllers.replicastates import place
from shoal.controllers.world import World
from shoal.core import facts
from shoal.core.placement import VariantPlan
from shoal.core.scaling import Load
from shoal.kube.errors import APIServerUnavailable, Conflict, NotFound
from shoal.kube.resources import DEPLOYMENTS, PODS

log = structlog.get_logger()

_ATTEMPTS: Final = 5
GOES_FIRST: Final = -1000
"""Deletion cost of a pod that is to go; others have 0."""
_UNKNOWN_LOSS: Final = 1 << 60

Loads = Callable[[str], Load | None]
"""What the agent of a pod says, by the pod's uid; None: the signal is stale."""


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
        for pod, cost in deletion_costs(pods, dict(plan.leaving), dict(plan.forced), self._loads, where):
            await self._mark(pod, cost)

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


def deletion_costs(
    pods: Iterable[facts.Pod],
    leaving: Mapping[str, int],
    forced: Mapping[str, int],
    loads: Loads = lambda _uid: None,
    where: Callable[[facts.Pod], str | None] = lambda pod: pod.node,
) -> list[tuple[facts.Pod, int]]:
    """The pods whose deletion cost has to change: so many as `leaving` says (node -> pods) go first, of each node at
    least `forced`. `where`: the place of a pod. The order: pods that do not serve, pods that are marked already, then
    the cheapest loss (fewest requests, least in the cache). A pod that was marked and is to stay loses its mark."""
    here = [p for p in pods if not p.deleting and not p.finished]
    must, spare = dict(forced), sum(leaving.values()) - sum(forced.values())
    chosen: set[str] = set()

    def order(pod: facts.Pod) -> tuple[bool, bool, int, int, bool, str]:
        running, cached = _loss(loads(pod.uid))
        stays = not leaving.get(where(pod) or "")
        return (pod.ready, pod.deletion_cost != GOES_FIRST, running, cached, stays, pod.name)

    ordered = sorted(here, key=order)
    for pod in ordered:
        placed = where(pod) or ""
        if must.get(placed, 0) > 0:
            must[placed] -= 1
            chosen.add(pod.uid)
    for pod in ordered:
        # A pod that no node holds goes before all others by itself, and was not counted among those that leave.
        if spare > 0 and pod.uid not in chosen and pod.node is not None:
            spare -= 1
            chosen.add(pod.uid)
    changes: list[tuple[facts.Pod, int]] = []
    for pod in ordered:
        cost = GOES_FIRST if pod.uid in chosen else 0
        if pod.deletion_cost != cost and (cost or pod.deletion_cost == GOES_FIRST):
            changes.append((pod, cost))
    return changes


def _loss(load: Load | None) -> tuple[int, int]:
    """(requests there, prompt tokens that its engine has read: the more, the more its cache holds)."""
    if load is None or load.running is None:
        return _UNKNOWN_LOSS, _UNKNOWN_LOSS
    return load.running + (load.waiting or 0), load.prompt_tokens_total or 0
