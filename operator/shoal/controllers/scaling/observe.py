"""One Model as the decider sees it: from the store, its record and the streams."""

from collections.abc import Callable
from datetime import datetime

from shoal.api import names, reasons
from shoal.api.model import Model
from shoal.controllers.coldstarts import ColdStarts
from shoal.controllers.scaling.signals import ScalingSignals
from shoal.controllers.state import FleetState
from shoal.controllers.world import World
from shoal.core import facts
from shoal.core.candidates import Considered
from shoal.core.placement import Candidate
from shoal.core.placement.modelplan import price
from shoal.core.scaling import ModelSnapshot, Policy, Replica, ScalingVariant, SignalSource
from shoal.core.scaling.estimate import least_work_rate
from shoal.core.status.conditions import find


def policy(model: Model) -> Policy:
    """What the spec asks for."""
    asked = model.spec.scaling
    return Policy(
        minimum=asked.min_replicas,
        maximum=asked.max_replicas if asked.max_replicas is not None else max(10, asked.min_replicas),
        kv_percent=asked.kv_utilization_percent,
        queued_per_replica=asked.queued_requests_per_replica,
        idle_seconds=float(asked.idle_seconds),
        stabilization_seconds=float(asked.stabilization_seconds),
    )


Past = Callable[[str, str, str], float | None]
"""(namespace, Model, GPU class) -> work per second that one replica did while requests waited; None: not known."""


def no_past(_namespace: str, _model: str, _gpu_class: str) -> float | None:
    """Where there is no history."""
    return None


class ModelObserver:
    """Makes snapshots. Times are those of `clock`."""

    def __init__(
        self,
        world: World,
        state: FleetState,
        cold: ColdStarts,
        signals: ScalingSignals,
        clock: Callable[[], float],
        past: Past,
    ) -> None:
        self._world, self._state, self._cold, self._signals, self._clock = world, state, cold, signals, clock
        self._past = past

    def replicas(self, uid: str) -> int:
        """Replicas that the Model's Deployments ask for."""
        return sum(d.replicas for d in self._deployments(uid))

    def snapshot(self, model: Model, *, wanted: int | None, term_began: float) -> ModelSnapshot:
        """`wanted` None: nothing was decided in this term; what the Deployments ask for counts."""
        uid, deployments = model.metadata.uid, self._deployments(model.metadata.uid)
        return ModelSnapshot(
            policy=policy(model),
            wanted=sum(d.replicas for d in deployments) if wanted is None else wanted,
            replicas=tuple(self._replica(p) for p in self._world.pods.by("model", uid) if not p.finished),
            sources=tuple(self.source(p, uid) for p in self._world.gateways() if p.was_ready and not self.is_dead(p)),
            variants=self._variants(model),
            rolling=any(d.replacing or not d.rolled_out for d in deployments),
            term_began=term_began,
            new=_never_ran(model, deployments),
            last_wake=self._wake_requested(model),
        )

    def is_dead(self, pod: facts.Pod) -> bool:
        return self._world.is_lost(pod)

    def source(self, gateway: facts.Pod, uid: str) -> SignalSource:
        """A gateway."""
        return SignalSource(gateway.name, self._signals.boot(gateway.uid), self._signals.demand(gateway.uid, uid))

    def _deployments(self, uid: str) -> list[facts.Deployment]:
        found = [c.deployment for c in self._world.deployments_of(uid)]
        return [d for d in found if d is not None and not d.deleting]

    def _replica(self, pod: facts.Pod) -> Replica:
        return Replica(
            uid=pod.uid,
            pod=pod.name,
            gpu_class=pod.gpu_class or "",
            ready=pod.ready,
            was_ready=pod.was_ready,
            deleting=pod.deleting,
            lost=self._world.is_lost(pod),
            created=self._at(pod.created) if pod.created else self._clock(),
            load=self._signals.load(pod.uid),
        )

    def _variants(self, model: Model) -> tuple[ScalingVariant, ...]:
        uid = model.metadata.uid
        record = self._state.record(uid)
        considered = record.considered
        if considered is None:
            return ()
        states, cold = self._state.replica_states(uid), self._cold.of(model)

        def variant(candidate: Candidate) -> ScalingVariant:
            name = candidate.gpu_class
            there = states.get(name)
            return ScalingVariant(
                gpu_class=name,
                replicas=there.replicas if there else 0,
                headroom=self._state.free_slots(name, candidate.gpus),
                maximum=candidate.max_replicas,
                kv_tokens=record.kv_tokens.get(name, candidate.kv_tokens),
                cold_start_seconds=float(cold[name]) if name in cold else None,
                work_rate=self._past(model.metadata.namespace or "", model.metadata.name, name),
                least_work_rate=self._least(considered, name),
            )

        order = sorted(considered.candidates, key=lambda c: (c.gpu_class in record.backoffs, *price(c)))
        return tuple(variant(c) for c in order)

    def _least(self, considered: Considered, gpu_class: str) -> float | None:
        found = self._world.classes.get(gpu_class)
        sized = considered.sized.get(gpu_class)
        if found is None or found.object is None or sized is None:
            return None
        bandwidth = found.object.spec.memory_bandwidth_gbps
        return None if bandwidth is None else least_work_rate(sized.weight_bytes_per_gpu, bandwidth)

    def _wake_requested(self, model: Model) -> float | None:
        text = model.metadata.annotations.get(names.ANNOTATION_WAKE)
        if not text:
            return None
        try:
            return self._at(datetime.fromisoformat(text))
        except (ValueError, TypeError):  # not a time, or one without a zone
            return None

    def _at(self, time: datetime) -> float:
        """A time of the cluster on the decider's clock; never in the future."""
        now = self._clock()
        return min(now, now - (self._world.now() - time).total_seconds())


def _never_ran(model: Model, deployments: list[facts.Deployment]) -> bool:
    """No Deployment that the scaler or KEDA ever wrote, and no word that the Model was sent to zero."""
    if any(d.replicas_managers != frozenset({names.MANAGER_MODEL}) for d in deployments):
        return False
    ready = find(model.status.conditions, reasons.READY) if model.status else None
    return ready is None or ready.reason != reasons.SCALED_TO_ZERO
