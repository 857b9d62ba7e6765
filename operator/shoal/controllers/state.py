"""What the operator remembers, in one place: a record per Model, and what concerns the whole fleet.

The store (`world.py`) holds what the cluster says. This holds what the operator found out, decided and promised. All of
it is in memory: an operator that starts learns it again. Deleting a Model deletes its record, and nothing else is left.

`FleetState.record(uid)` is a Model's record. The docstring of each field names its writer; every module may read it.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final

from shoal.api.gpuclass import GPUClass, QuarantinedGPUs
from shoal.api.model import CanaryAnswers, Model, PrefetchStatus
from shoal.controllers.capacity import FleetGPUs
from shoal.controllers.placementrequest import PlacementDecision, PlacementRequest
from shoal.controllers.replicastates import observe
from shoal.controllers.reservations import Reservation, Reservations
from shoal.controllers.world import World
from shoal.core import facts
from shoal.core.candidates import Considered
from shoal.core.coldstart import ColdStart, FirstAnswer
from shoal.core.devices import Claim
from shoal.core.enginerevision import EngineRevision
from shoal.core.fleet import FleetModel, FleetPlan
from shoal.core.lora.pool import same_engines
from shoal.core.placement import ClassSupply, Placement, ReplicaState, VariantPlan
from shoal.core.placement.backoff import ClassBackoff, counting
from shoal.core.placement.outages import NodeOutage
from shoal.core.proven import still_said
from shoal.core.scaling import ScalingDecision, ScalingMemory, Steady
from shoal.core.status.observed import ModelProblem
from shoal.kube.projections import Child, Custom

DECISIONS_KEPT: Final = 20
"""Scaling decisions of each Model."""
_NO_BACKOFFS: Final[Mapping[str, str]] = {}
_NO_CRASHES: Final[frozenset[str]] = frozenset()


@dataclass(frozen=True, slots=True)
class SizedModel:
    """The GPU classes that a Model may use, by the sums alone."""

    request: PlacementRequest
    fleet: int
    """Revision of classes, their GPUs and prices."""
    considered: Considered


@dataclass(frozen=True, slots=True)
class PlanFailure:
    """A Model that cannot be planned for now."""

    request: PlacementRequest
    problem: ModelProblem
    until: float
    """Monotonic seconds."""


@dataclass(slots=True)
class DecisionEntry:
    """A scaling decision, and how often it was made in a row."""

    time: datetime
    decision: ScalingDecision
    count: int = 1


@dataclass(slots=True)
class ScalingRecord:
    """A Model's replicas in this term."""

    wanted: int
    decision: ScalingDecision | None = None
    """The last one that changed the number, until that number serves."""
    memory: ScalingMemory | None = None
    at: float = float("-inf")
    """When it was decided last, in the scaler's seconds."""
    timer: asyncio.TimerHandle | None = None
    """When it is decided again without another signal."""

    def close(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


@dataclass(slots=True)
class StaleRecord:
    """Which signal sources of a Model are stale, as its status says it."""

    known: Steady
    timer: asyncio.TimerHandle | None = None

    def close(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


@dataclass(slots=True)
class ModelRecord:
    """Everything that is remembered of one Model."""

    # --- found out ---
    request: PlacementRequest | None = None
    """What it asks of the plan. Written by the Model's controller (`FleetState.enter`)."""
    sized: SizedModel | None = None
    """Written by `Sizes`."""
    kv_tokens: dict[str, int] = field(default_factory=dict[str, int])
    """Class -> KV tokens of one replica, as its engine says. Written by `Calibration`."""
    cold_starts: dict[str, int] = field(default_factory=dict[str, int])
    """Class -> seconds of the last cold start. Written by `ColdStarts`."""
    start_stages: dict[str, deque[ColdStart]] = field(default_factory=dict[str, "deque[ColdStart]"])
    """Class -> stages of the last cold starts. Written by `ColdStarts`."""
    canaries: dict[str, CanaryAnswers] = field(default_factory=dict[str, CanaryAnswers])
    """Class -> what replicas there answer to the canary; what was learned before this term stands in the status.
    Written by `HealthProbes`."""
    first_tokens: dict[str, FirstAnswer] = field(default_factory=dict[str, FirstAnswer])
    """Pod's uid -> the earliest request that a gateway tells of. Written by `ColdStarts`."""
    prefetch: tuple[PrefetchStatus, ...] = ()
    """Weights in node caches, per class. Written by `PrefetchController`."""
    all_backoffs: Mapping[str, ClassBackoff] = field(default_factory=dict[str, ClassBackoff])
    """Classes on which its replicas failed to start, also those where only another revision did. Written by
    `ClassBackoffs`."""
    applied: dict[str, EngineRevision] = field(default_factory=dict[str, EngineRevision])
    """Class -> what the pod template of its Deployment runs; none: not written in this term. Written by the
    Executor."""
    lacks_surge: frozenset[str] = frozenset()
    """Classes where a rollout waits until the plan has looked for room on another class. Written by the Executor."""
    keda_ca: str | None = None
    """The CA that its ConfigMap for KEDA was seen to have. Written by the KEDA driver."""
    replica_states: Mapping[str, ReplicaState] | None = None
    """Class -> what runs there or is promised; None: not looked up since something changed."""

    # --- decided: by the planner ---
    considered: Considered | None = None
    """The classes that it may use, as of the last plan."""
    planned: FleetModel | None = None
    """What the last plan read of it."""
    decided: tuple[PlacementRequest, PlacementDecision] | None = None
    """What was decided, and for which request."""
    plan_failure: PlanFailure | None = None

    # --- decided: by the scaler ---
    scaling: ScalingRecord | None = None
    """None: nothing was decided in this term."""
    scaling_failure: ModelProblem | None = None
    history: deque[DecisionEntry] = field(default_factory=lambda: deque[DecisionEntry](maxlen=DECISIONS_KEPT))
    stale: StaleRecord | None = None

    @property
    def placement(self) -> PlacementDecision | None:
        """What was decided last, for whatever request."""
        return self.decided[1] if self.decided is not None else None

    @property
    def failure(self) -> ModelProblem | None:
        """Why no plan or no decision on its replicas is made, so that it keeps what it has; None: they are made."""
        return self.plan_failure.problem if self.plan_failure is not None else self.scaling_failure

    @property
    def backoffs(self) -> Mapping[str, ClassBackoff]:
        """Classes in backoff for the Model as it is asked for now."""
        if not self.all_backoffs or self.request is None:
            return self.all_backoffs
        return counting(self.all_backoffs, self.request.engine_revision)

    @property
    def backoff_reasons(self) -> Mapping[str, str]:
        """Class -> why it is the last choice for now."""
        return {name: each.why for name, each in self.backoffs.items()} if self.all_backoffs else _NO_BACKOFFS

    @property
    def crashes(self) -> frozenset[str]:
        """Classes where its engine ended again and again."""
        if not self.all_backoffs:
            return _NO_CRASHES
        return frozenset(name for name, each in self.backoffs.items() if each.crashes)

    def close_scaling(self) -> None:
        """What was decided on its replicas counts no more."""
        for each in (self.scaling, self.stale):
            if each is not None:
                each.close()
        self.scaling, self.stale, self.scaling_failure = None, None, None
        self.history.clear()

    def withdraw(self) -> None:
        """It asks nothing of the plan any more."""
        self.request, self.sized, self.considered, self.planned = None, None, None, None
        self.decided, self.plan_failure, self.replica_states = None, None, None
        self.lacks_surge = frozenset()
        self.kv_tokens = {}


class FleetState:
    """The records of all Models, the GPUs of the fleet, and what is promised of them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.gpus = FleetGPUs(world)
        self.reservations = Reservations(self.refresh)
        self.plan_due = asyncio.Event()
        """Something has changed that the plan reads."""
        self.plan_urgent = asyncio.Event()
        """Set while a request waits for the next plan."""
        self.starting: set[str] = set()
        """Uids of Models with a pod that was never ready, as far as its events say. Written by `ClassBackoffs`."""
        self.outages: Mapping[str, NodeOutage] = {}
        """Class -> why no further node of it is expected. Written by `ClassBackoffs`; the status of the class has it
        too, for the next leader."""
        self._records: dict[str, ModelRecord] = {}
        self._supplies: dict[str, ClassSupply] = {}
        self._planned_gpus: dict[str, int] = {}
        """Class -> GPUs that the last plan gave to replicas which no node holds yet."""
        self._contested: frozenset[str] = frozenset()

    # --- records ----------------------------------------------------------------------------------------------------

    def record(self, model_uid: str) -> ModelRecord:
        """A Model's record. Of a Model that is not in the store: an empty one, which nobody keeps."""
        found = self._records.get(model_uid)
        if found is None:
            found = ModelRecord()
            if self._world.model_by_uid(model_uid) is not None:
                self._records[model_uid] = found
        return found

    def records(self) -> Iterable[tuple[str, ModelRecord]]:
        """(Model's uid, its record) of every Model."""
        return tuple(self._records.items())

    def drop(self, model_uid: str) -> None:
        """The Model is gone."""
        self.withdraw(model_uid)
        if (found := self._records.pop(model_uid, None)) is not None:
            found.close_scaling()

    # --- what changes in the store ------------------------------------------------------------------------------------

    def on_pod(self, _key: str, before: facts.Pod | None, after: facts.Pod | None) -> None:
        for model_uid in {pod.model_uid for pod in (before, after) if pod is not None and pod.model_uid}:
            self.refresh(model_uid)
            self.replan()

    def on_deployment(self, _key: str, before: Child | None, after: Child | None) -> None:
        self.on_scaled_object(_key, before, after)
        was, now = (child.deployment if child else None for child in (before, after))
        if was is not None and (now is None or now.rolled_out):
            self.reservations.remove(was.model_uid, "surge", was.gpu_class)
        self.replan()

    def on_scaled_object(self, _key: str, before: Child | None, after: Child | None) -> None:
        for child in (before, after):
            if child is not None:
                self.refresh(child.model_uid)

    def on_model(self, _key: str, before: Custom[Model] | None, after: Custom[Model] | None) -> None:
        if before is not None and (after is None or after.metadata.uid != before.metadata.uid):
            self.drop(before.metadata.uid)
        if after is not None and (after.metadata.deletion_timestamp is not None or after.object is None):
            self.withdraw(after.metadata.uid)

    def on_claim(self, _key: str, before: Claim | None, after: Claim | None) -> None:
        """The devices that a replica has may say that it is to be replaced."""
        for claim in (before, after):
            for name, _ in claim.pods if claim is not None else ():
                pod = self._world.pods.get(f"{claim.namespace}/{name}") if claim is not None else None
                self.refresh(pod.model_uid if pod is not None else None)

    def on_class(self, _key: str, before: Custom[GPUClass] | None, after: Custom[GPUClass] | None) -> None:
        if _quarantined(before) != _quarantined(after):
            for record in self._records.values():
                record.replica_states = None
        self.replan()

    # --- what Models ask of the plan --------------------------------------------------------------------------------

    def enter(self, request: PlacementRequest) -> None:
        """A Model's request, as of now."""
        model, record = request.model, self.record(request.model.metadata.uid)
        before = record.request
        if request.same(before):
            return
        if before is None:
            record.kv_tokens = _stored_kv_tokens(model) | record.kv_tokens
        elif not same_engines(before.pool, request.pool):
            record.kv_tokens = {}  # said by engines with another pool
        else:
            record.kv_tokens = still_said(record.kv_tokens, before.model.spec, model.spec)
        record.request = request
        self.plan_due.set()

    def withdraw(self, model_uid: str) -> None:
        """The Model asks nothing of the plan any more: it is being deleted, or is not understood."""
        found = self._records.get(model_uid)
        if found is not None:
            if found.request is not None:
                self.plan_due.set()
            found.withdraw()
        self.reservations.remove(model_uid, "apply")
        self.reservations.remove(model_uid, "wake")

    def replan(self, *, hurry: bool = False) -> None:
        """A change was applied or has failed, or another number is wanted. `hurry`: a request waits for the plan."""
        self.plan_due.set()
        if hurry:
            self.plan_urgent.set()

    def decided(self, request: PlacementRequest) -> PlacementDecision | None:
        """What was decided for exactly this request; None: not yet, the planner wakes the Model."""
        known = self.record(request.model.metadata.uid).decided
        return known[1] if known is not None and request.same(known[0]) else None

    # --- replicas ---------------------------------------------------------------------------------------------------

    def replica_states(self, model_uid: str) -> Mapping[str, ReplicaState]:
        """Class -> what runs there, is being applied, or is promised."""
        record = self.record(model_uid)
        found = record.replica_states
        if found is None:
            found = record.replica_states = observe(self._world, model_uid, self.reservations)
        return found

    def refresh(self, model_uid: str | None) -> None:
        """One of the Model's objects has changed, or something else is promised to it."""
        found = self._records.get(model_uid) if model_uid else None
        if found is not None:
            found.replica_states = None

    def target(self, model_uid: str, gpu_class: str, planned: int) -> int:
        """Replicas that a Deployment shall have, asked right before they are written: what was `planned` may be old by
        then."""
        latest = self._latest_variant(model_uid, gpu_class)
        return max(planned if latest is None else latest.replicas, self.woken(model_uid, gpu_class))

    def latest(self, model_uid: str, planned: VariantPlan) -> VariantPlan:
        """What counts by now of a variant; `planned` where no later plan has it."""
        return self._latest_variant(model_uid, planned.gpu_class) or planned

    def target_as_marked(self, model_uid: str, marked: VariantPlan) -> int:
        """As `target`, once those pods were marked that go first by `marked`. The number falls only by that plan: by a
        later one, the Deployment would delete pods that are to stay. That plan's own run marks those that go."""
        replicas, latest = self.target(model_uid, marked.gpu_class, marked.replicas), self.latest(model_uid, marked)
        same = (latest.replicas, latest.leaving, latest.forced) == (marked.replicas, marked.leaving, marked.forced)
        if same or not replicas:
            return replicas
        live = self._world.deployment_of(model_uid, marked.gpu_class)
        return max(replicas, live.deployment.replicas if live is not None and live.deployment is not None else 0)

    def _latest_variant(self, model_uid: str, gpu_class: str) -> VariantPlan | None:
        known = self.record(model_uid).placement
        variants = known.placement.variants if known is not None else ()
        return next((v for v in variants if v.gpu_class == gpu_class), None)

    def dead_ends(self, model_uid: str) -> frozenset[str]:
        """Classes on which no replica of the Model that starts is expected to become ready."""
        out = self.outages
        pods = [p for p in self._world.pods.by("model", model_uid) if not p.deleting] if out else []
        waits = {p.gpu_class for p in pods if p.gpu_class in out and p.node is None and not p.node_announced}
        starts = {p.gpu_class for p in pods if not (p.ready or p.finished) and (p.node is not None or p.node_announced)}
        return frozenset({*self.record(model_uid).backoffs, *(name for name in waits - starts if name)})

    # --- GPUs between two plans -------------------------------------------------------------------------------------

    def begin_apply(self, model_uid: str, variants: Iterable[tuple[str, int, int]]) -> None:
        """(class, replicas, GPUs of each) that are about to be applied: a plan made meanwhile counts on them."""
        made = (Reservation(model_uid, name, replicas, gpus, "apply") for name, replicas, gpus in variants)
        self.reservations.replace(model_uid, "apply", made)

    def end_apply(self, model_uid: str) -> None:
        """What was applied stands in the Deployments, or has failed."""
        self.reservations.remove(model_uid, "apply")

    def template_written(self, model_uid: str, gpu_class: str, request: PlacementRequest) -> None:
        """The Deployment of a class has the pod template that a request asks for."""
        record = self.record(model_uid)
        known = record.request
        # What is equal stays the same objects.
        same = known if known is not None and request.same(known) else request
        record.applied[gpu_class] = same.engine_revision(gpu_class)

    def reserve_wake(self, model_uid: str, gpu_class: str, replicas: int, gpus: int) -> None:
        """So many replicas are about to be asked for on a class before a plan says so."""
        made = Reservation(model_uid, gpu_class, replicas, gpus, "wake")
        self.reservations.replace(model_uid, "wake", [made])

    def wake_written(self, model_uid: str) -> None:
        """They stand in the Deployment now: the next plan decides about them."""
        for each in tuple(self.reservations.of(model_uid, "wake").values()):
            self.reservations.put(replace(each, written=True))

    def release_wake(self, model_uid: str) -> None:
        """They could not be asked for."""
        self.reservations.remove(model_uid, "wake")

    def woken(self, model_uid: str, gpu_class: str) -> int:
        """Replicas that were asked for ahead of the plan; 0: none."""
        found = self.reservations.of(model_uid, "wake").get(gpu_class)
        return found.replicas if found is not None else 0

    def written_wakes(self) -> tuple[Reservation, ...]:
        """The plan that is made now reads these from their Deployments."""
        return tuple(each for each in self.reservations.all("wake") if each.written)

    def reserve_surge(self, model_uid: str, gpu_class: str, gpus: int) -> bool:
        """Promises the GPUs of one further replica to a rollout, if there are any that nobody waits for: free ones, or
        those of a node that an autoscaler would add."""
        if gpu_class in self.reservations.of(model_uid, "surge"):
            return True
        supply = self._supplies.get(gpu_class)
        if supply is None:
            return False
        taken = self._unbound_gpus().get(gpu_class, 0) + self.reservations.gpus(gpu_class, "surge")
        coming = 0 if gpu_class in self.outages else supply.coming
        free = [*(max(0, node.free) for node in supply.nodes), *[supply.coming_gpus] * coming]
        if max(free, default=0) < gpus or sum(amount // gpus * gpus for amount in free) - taken < gpus:
            return False
        self.reservations.put(Reservation(model_uid, gpu_class, 1, gpus, "surge"))
        return True

    def lack_surge(self, model_uid: str, gpu_class: str, *, lacks: bool) -> None:
        """Whether a rollout waits on a class for GPUs of one replica more. The next plan looks for them elsewhere."""
        record = self.record(model_uid)
        if lacks != (gpu_class in record.lacks_surge):
            record.lacks_surge = record.lacks_surge ^ {gpu_class}
            self.replan(hurry=lacks)

    def free_slots(self, gpu_class: str, gpus: int) -> int:
        """Further replicas of so many GPUs that a class has free GPUs for now, beside what was promised already."""
        taken = self._planned_gpus.get(gpu_class, 0) + self.reservations.gpus(gpu_class, "wake", "surge")
        return max(0, self.gpus.slots(gpu_class, gpus) - -(-taken // gpus)) if gpus > 0 else 0

    def contested(self, gpu_class: str) -> bool:
        """Whether a Model waits for GPUs of the class: who gets them is decided over the whole fleet."""
        return gpu_class in self._contested

    def supplies(self) -> tuple[ClassSupply, ...]:
        """What a plan that begins now may give away."""
        found = tuple(
            replace(supply, outage=out.why) if (out := self.outages.get(supply.name)) is not None else supply
            for supply in self.gpus.supplies()
        )
        self._supplies = {supply.name: supply for supply in found}
        return found

    def planned(self, plan: FleetPlan, seen: Iterable[Reservation]) -> None:
        """A plan counts from now on, which read the wakes `seen` from their Deployments. A Model that was woken anew
        meanwhile keeps its reservation."""
        for each in seen:
            if self.reservations.of(each.model_uid, "wake").get(each.gpu_class) is each:
                self.release_wake(each.model_uid)
        self._planned_gpus = self._unbound_gpus()
        self._contested = frozenset(
            candidate.gpu_class
            for decision in plan.models.values()
            if (placement := self._latest(decision.demand.uid)) is not None and (placement.missing or placement.waiting)
            for candidate in decision.demand.candidates
        )

    def begin_term(self) -> None:
        """What was decided in an earlier term, perhaps long ago, counts no more; nothing is on its way."""
        for record in self._records.values():
            record.decided = None
            record.canaries = {}
            record.applied = {}
        self.reservations.clear("apply", "wake")
        for record in self._records.values():
            record.replica_states = None
        self.plan_due.set()

    def _latest(self, model_uid: str) -> Placement | None:
        found = self._records.get(model_uid)
        return found.decided[1].placement if found is not None and found.decided is not None else None

    def _unbound_gpus(self) -> dict[str, int]:
        """Class -> GPUs that were decided for replicas which no node holds yet."""
        found: dict[str, int] = {}
        for uid, record in self._records.items():
            for v in record.decided[1].placement.variants if record.decided is not None else ():
                if v.replicas > v.waiting:
                    runs = self.replica_states(uid).get(v.gpu_class)
                    more = v.replicas - v.waiting - (runs.bound + runs.held_back if runs else 0)
                    if more > 0:
                        found[v.gpu_class] = found.get(v.gpu_class, 0) + more * v.gpus
        return found


def _quarantined(custom: Custom[GPUClass] | None) -> tuple[QuarantinedGPUs, ...]:
    found = custom.object if custom is not None else None
    return found.status.quarantined if found is not None and found.status is not None else ()


def _stored_kv_tokens(model: Model) -> dict[str, int]:
    """What the status of a Model says of the specification that it has now."""
    if model.status is None or model.status.observed_generation != model.metadata.generation:
        return {}
    said = ((v.gpu_class, v.kv_tokens_per_replica) for v in model.status.variants)
    return {name: tokens.engine for name, tokens in said if tokens is not None and tokens.engine}
