"""One Model as the decider sees it: from the store, the planner and the streams."""

from collections.abc import Callable
from datetime import datetime

from shoal.api import names, reasons
from shoal.api.model import Model
from shoal.controllers.coldstarts import ColdStarts
from shoal.controllers.planner import Planner
from shoal.controllers.scaling.ears import Ears
from shoal.controllers.world import World
from shoal.core import facts
from shoal.core.candidates import Considered
from shoal.core.conditions import find
from shoal.core.placement import Candidate
from shoal.core.placement.case import price
from shoal.core.scaling import Policy, Replica, Snapshot, Variant, Voice
from shoal.core.scaling.estimate import least_work_rate


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


class Observer:
    """Makes snapshots. Times are those of `clock`."""

    def __init__(
        self, world: World, planner: Planner, cold: ColdStarts, ears: Ears, clock: Callable[[], float], past: Past
    ) -> None:
        self._world, self._planner, self._cold, self._ears, self._clock = world, planner, cold, ears, clock
        self._past = past

    def standing(self, uid: str) -> int:
        """Replicas that the Model's Deployments ask for."""
        return sum(d.replicas for d in self._deployments(uid))

    def snapshot(self, model: Model, *, wanted: int | None, term_began: float) -> Snapshot:
        """`wanted` None: nothing was decided in this term; what the Deployments ask for counts."""
        uid, deployments = model.metadata.uid, self._deployments(model.metadata.uid)
        return Snapshot(
            policy=policy(model),
            wanted=sum(d.replicas for d in deployments) if wanted is None else wanted,
            replicas=tuple(self._replica(p) for p in self._world.pods.by("model", uid) if not p.finished),
            voices=tuple(self.voice(p, uid) for p in self._world.gateways() if p.was_ready and not self.is_dead(p)),
            variants=self._variants(model),
            rolling=any(d.replacing or not d.rolled_out for d in deployments),
            term_began=term_began,
            new=_never_ran(model, deployments),
            asked=self._asked(model),
        )

    def is_dead(self, pod: facts.Pod) -> bool:
        return self._world.is_lost(pod)

    def voice(self, gateway: facts.Pod, uid: str) -> Voice:
        """A gateway."""
        return Voice(gateway.name, self._ears.boot(gateway.uid), self._ears.demand(gateway.uid, uid))

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
            load=self._ears.load(pod.uid),
        )

    def _variants(self, model: Model) -> tuple[Variant, ...]:
        uid = model.metadata.uid
        considered = self._planner.considered(uid)
        if considered is None:
            return ()
        standing = self._planner.standings.of(uid)
        tokens, cold = self._planner.calibration.tokens(uid), self._cold.of(model)

        def variant(candidate: Candidate) -> Variant:
            name = candidate.gpu_class
            there = standing.get(name)
            return Variant(
                gpu_class=name,
                replicas=there.replicas if there else 0,
                room=self._planner.promises.room(name, candidate.gpus),
                maximum=candidate.max_replicas,
                kv_tokens=tokens.get(name, candidate.kv_tokens),
                cold_start_seconds=float(cold[name]) if name in cold else None,
                work_rate=self._past(model.metadata.namespace or "", model.metadata.name, name),
                least_work_rate=self._least(considered, name),
            )

        setbacks = self._planner.setbacks(uid)
        order = sorted(considered.candidates, key=lambda c: (c.gpu_class in setbacks, *price(c)))
        return tuple(variant(c) for c in order)

    def _least(self, considered: Considered, gpu_class: str) -> float | None:
        found = self._world.classes.get(gpu_class)
        sized = considered.sized.get(gpu_class)
        if found is None or found.object is None or sized is None:
            return None
        bandwidth = found.object.spec.memory_bandwidth_gbps
        return None if bandwidth is None else least_work_rate(sized.weight_bytes_per_gpu, bandwidth)

    def _asked(self, model: Model) -> float | None:
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
