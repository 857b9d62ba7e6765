"""Consolidation of each class: gathers what the store and the signals say of its nodes, and asks `core/consolidation`.

The node that is being emptied stands in the status of the GPUClass: placement counts it as out of use there, and an
operator that starts goes on with it. It has the label by which engine pods avoid it before its status says so.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final, NamedTuple

import structlog

from shoal.api import reasons
from shoal.api.gpuclass import ConsolidatedNode, GPUClass
from shoal.controllers.coldstarts import ColdStarts
from shoal.controllers.health import FleetHealth
from shoal.controllers.scaling.signals import ScalingSignals
from shoal.controllers.state import FleetState
from shoal.controllers.world import World
from shoal.core import facts, quantity
from shoal.core.consolidation import (
    ConsolidationMemory,
    ConsolidationPlan,
    ConsolidationSnapshot,
    EmptiedNode,
    ModelThere,
    NodeThere,
    PendingPod,
    ReplicaThere,
    decide,
    rested,
)
from shoal.core.gpus import takes_pods
from shoal.core.health import HealthPlan
from shoal.core.layers.texts import shorten
from shoal.core.status import consolidationstatus
from shoal.core.status.conditions import ConditionUpdate
from shoal.kube.events import Event
from shoal.kube.resources import GPUCLASSES

log = structlog.get_logger()

_LONGEST: Final = 512


class ClassConsolidation(NamedTuple):
    """What the status of a class says, and when to look again."""

    emptied: ConsolidatedNode | None = None
    """The node that is being emptied from now on."""
    condition: ConditionUpdate | None = None
    """None: the class does not ask for consolidation."""
    recheck_seconds: float | None = None


class FleetConsolidation:
    """Remembers since when replicas are quiet, of this term only. Only the leader calls `reconcile`."""

    def __init__(self, world: World, state: FleetState, cold: ColdStarts, signals: ScalingSignals) -> None:
        self._world, self._state, self._cold, self._signals = world, state, cold, signals
        self._memory: dict[str, ConsolidationMemory] = {}
        """Uid of the class."""

    def begin_term(self) -> None:
        """What was seen before, perhaps long ago, counts no more."""
        self._memory.clear()

    def forget(self, live: set[str]) -> None:
        """Keeps what is remembered of the classes with these uids."""
        self._memory = {uid: memory for uid, memory in self._memory.items() if uid in live}

    async def reconcile(self, gpu_class: GPUClass, health: HealthPlan, labels: FleetHealth) -> ClassConsolidation:
        """A node that begins to be emptied is labelled here."""
        name, uid = gpu_class.metadata.name, gpu_class.metadata.uid
        autoscaled = gpu_class.spec.nodes.autoscaled
        stands = gpu_class.status.consolidation if gpu_class.status is not None else None
        if stands is None and (autoscaled is None or autoscaled.consolidate is None):
            self._memory.pop(uid, None)
            return ClassConsolidation()
        now = self._world.now()
        plan, self._memory[uid] = decide(self.snapshot(gpu_class, health), self._memory.get(uid), now)
        if plan.began and plan.emptied is not None:
            node = plan.emptied.node
            await labels.label(name, health, node)
            if not labels.is_labelled(name, node):
                # The replacement could be bound to the very node.
                log.warning("node not emptied: it could not be labelled", gpu_class=name, node=node)
                self._memory[uid] = rested(self._memory[uid], now)
                plan = replace(plan, emptied=None, began=False, stays={node: "Shoal could not label it"})
        self._tell(gpu_class, plan)
        shown = _shown(plan.emptied) if plan.emptied is not None else None
        return ClassConsolidation(shown, consolidationstatus.condition(plan), plan.recheck_seconds)

    def snapshot(self, gpu_class: GPUClass, health: HealthPlan) -> ConsolidationSnapshot:
        """The class as of now."""
        name, world, now = gpu_class.metadata.name, self._world, self._world.now()
        autoscaled, cost = gpu_class.spec.nodes.autoscaled, gpu_class.spec.hourly_cost
        wanted = autoscaled.consolidate if autoscaled is not None else None
        stands = gpu_class.status.consolidation if gpu_class.status is not None else None
        models: dict[str, ModelThere] = {}
        on: dict[str, list[ReplicaThere]] = {}
        pending: list[PendingPod] = []
        for pod in world.pods.by("class", name):
            if pod.model_uid is None:
                continue
            if pod.node is None:
                if not pod.deleting:
                    since = (now - pod.created).total_seconds() if pod.created is not None else 0.0
                    pending.append(PendingPod(pod.key, since, pod.unschedulable or ""))
                continue
            model = models.get(pod.model_uid)
            if model is None:
                model = models[pod.model_uid] = self._model(pod.model_uid, name)
            on.setdefault(pod.node, []).append(self._replica(pod, model, gpu_class.resource))
        return ConsolidationSnapshot(
            after_seconds=float(wanted.after_seconds) if wanted is not None else None,
            nodes=tuple(self._nodes(gpu_class, on)),
            pending=tuple(pending),
            contested=self._state.contested(name),
            out_of_use=bool(health.quarantined),
            emptied=EmptiedNode(stands.node, stands.since, stands.message, stands.empty_since) if stands else None,
            hourly_cost=(quantity.parse(cost.amount), cost.currency) if cost is not None else None,
        )

    def _nodes(self, gpu_class: GPUClass, on: dict[str, list[ReplicaThere]]) -> Iterator[NodeThere]:
        resource, gpus = gpu_class.resource, self._state.gpus
        for node in gpus.members().get(gpu_class.metadata.name, ()):
            replicas = tuple(on.get(node.name, ()))
            yield NodeThere(
                name=node.name,
                allocatable=node.allocatable.get(resource, 0),
                replicas=replicas,
                others=gpus.held(node.name, resource) - sum(each.gpus for each in replicas),
                takes_pods=takes_pods(node, gpu_class.spec.tolerations),
                keeps=node.keeps,
            )

    def _replica(self, pod: facts.Pod, model: ModelThere, resource: str) -> ReplicaThere:
        return ReplicaThere(
            uid=pod.uid,
            pod=pod.key,
            model=model,
            gpus=pod.requests.get(resource, 0),
            ready=pod.ready,
            load=self._signals.load(pod.uid),
            deleting=pod.deleting,
            keeps=pod.keeps,
        )

    def _model(self, uid: str, gpu_class: str) -> ModelThere:
        custom = self._world.model_by_uid(uid)
        if custom is None or custom.object is None:
            return ModelThere(uid, None, None, fixed="is not a Model that can be read")
        model, cold = custom.object, self._cold.of(custom.object).get(gpu_class)
        alive = sum(not pod.deleting and not pod.finished for pod in self._world.pods.by("model", uid))
        goes = alive > model.spec.scaling.min_replicas
        return ModelThere(
            key=model.key,
            held=self._held(uid),
            cold_start_seconds=float(cold) if cold is not None else None,
            idle_seconds=float(model.spec.scaling.idle_seconds) if goes else None,
            fixed=self._fixed(uid, gpu_class),
            unsettled=self._unsettled(uid),
        )

    def _held(self, model_uid: str) -> int | None:
        """Requests that gateways hold; None: one of them does not say it."""
        total = 0
        for gateway in self._world.gateways():
            if not gateway.was_ready or self._world.is_lost(gateway):
                continue
            demand = self._signals.demand(gateway.uid, model_uid)
            if demand is None or not demand.complete:
                return None
            total += demand.held
        return total

    def _fixed(self, uid: str, gpu_class: str) -> str:
        record = self._state.record(uid)
        if record.request is None or record.request.role == "frozen":
            return "keeps what it has"
        if record.failure is not None:
            return "cannot be planned"
        if gpu_class in record.backoffs:
            return "is in backoff on the class"
        if gpu_class in self._state.outages:
            return "has a class of which no further node is expected"
        if any(d.replacing for d in self._deployments(uid)):
            return "is being rolled out"
        return ""

    def _unsettled(self, uid: str) -> str:
        placement = self._state.record(uid).placement
        if placement is None or placement.placement.reason != reasons.PLACED_ON:
            return "is not placed yet, or moves"
        return "is being scaled" if any(not d.rolled_out for d in self._deployments(uid)) else ""

    def _deployments(self, uid: str) -> list[facts.Deployment]:
        found = [child.deployment for child in self._world.deployments_of(uid)]
        return [d for d in found if d is not None and not d.deleting]

    def _tell(self, gpu_class: GPUClass, plan: ConsolidationPlan) -> None:
        name = gpu_class.metadata.name
        for node, why in plan.stays.items():
            log.debug("node.stays", gpu_class=name, node=node or None, why=why)
        if plan.began and (emptied := plan.emptied) is not None:
            log.info("node.empty", gpu_class=name, node=emptied.node, why=emptied.message)
            self._emit(gpu_class, reasons.CONSOLIDATING, f"node {emptied.node} is being emptied: {emptied.message}")
        if (ended := plan.ended) is not None:
            log.info("node.emptied", gpu_class=name, node=ended.emptied.node, result=ended.result, why=ended.why)
            removed = ended.result == "removed"
            reason = reasons.CONSOLIDATED if removed else reasons.CONSOLIDATION_ENDED
            how = "is gone" if removed else "is in use again"
            self._emit(gpu_class, reason, f"node {ended.emptied.node} {how}: {ended.why}")

    def _emit(self, gpu_class: GPUClass, reason: str, text: str) -> None:
        self._world.recorder.emit(Event(GPUCLASSES, gpu_class.metadata, "Normal", reason, text, "Consolidate"))


def _shown(emptied: EmptiedNode) -> ConsolidatedNode:
    return ConsolidatedNode(
        node=emptied.node,
        since=emptied.since,
        empty_since=emptied.empty_since,
        message=shorten(emptied.message, _LONGEST),
    )
