"""One plan for the whole fleet, made again when the world has changed; each Model's reconcile applies its part."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import prometheus_client
import structlog

from shoal.api.gpuclass import GPUClass
from shoal.api.model import Model
from shoal.controllers.calibration import Calibration
from shoal.controllers.capacity import FleetGPUs
from shoal.controllers.isolation import internal_error
from shoal.controllers.placementrequest import PlacementDecision, PlacementRequest
from shoal.controllers.replicastates import ReplicaStates
from shoal.controllers.reservations import Reservations
from shoal.controllers.sizes import Sizes
from shoal.controllers.surgereservations import SurgeReservations
from shoal.controllers.world import World
from shoal.core import facts
from shoal.core.candidates import Considered
from shoal.core.fleet import FleetModel, FleetPlan, FleetSnapshot, ModelDecision, decide_steps
from shoal.core.lora.pool import same_engines
from shoal.core.placement import ClassSupply, Demand, Moves
from shoal.core.status import modelstatus
from shoal.core.status.observed import ModelProblem
from shoal.kube.projections import Child, Custom

log = structlog.get_logger()

SETTLE_SECONDS: Final = 0.1
"""Changes come in bunches: one plan for all of a bunch."""
PACE_SECONDS: Final = 0.3
"""From one plan to the next at least."""
SHARE: Final = 5
"""A plan that takes long makes the next one wait, so that planning takes at most this fraction of the time; half of it
while somebody is in a hurry."""
SLICE_SECONDS: Final = 0.002
"""Of a plan at a stretch, as far as it can be cut: who wakes does not wait for a whole plan."""
MESSAGE_DELAY_SECONDS: Final = 3.0
"""Delay of a reconcile where only a message has changed, such as how many GPUs are free elsewhere."""
RETRY_SECONDS: Final = 60.0
"""A Model whose part of the plan ends in an error is left out of plans for this time, unless its request changes."""
SECONDS = prometheus_client.Histogram(
    "shoal_plan_seconds", "Duration of one plan of the whole fleet.", buckets=(0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 5)
)


@dataclass(frozen=True, slots=True)
class _Failed:
    """A Model that cannot be planned for now."""

    request: PlacementRequest
    problem: ModelProblem
    until: float


@dataclass(frozen=True, slots=True)
class _PlanInput:
    """What one plan is made of."""

    requests: Mapping[str, PlacementRequest]
    fleet: FleetSnapshot
    reserved: Mapping[str, object]
    """Wake reservations that the plan counts as replicas: `ReplicaStates.written_reservations`."""


def _untried(demand: Demand) -> frozenset[str]:
    usable = (c.gpu_class for c in demand.candidates if c.max_replicas != 0)
    return frozenset(name for name in usable if name not in demand.backoffs)


def _none(_uid: str) -> Mapping[str, str]:
    return {}


class Planner:
    """Plans the whole fleet. `enter` each Model's request, `run` the planner, and read `decided`. `wake` is called with
    the key of each Model whose part of the plan changed."""

    def __init__(self, world: World, capacity: FleetGPUs, replica_states: ReplicaStates, moves: Moves) -> None:
        self._world, self._capacity, self.replica_states, self._moves = world, capacity, replica_states, moves
        self._requests: dict[str, PlacementRequest] = {}
        self._models: dict[str, FleetModel] = {}
        self._decided: dict[str, tuple[PlacementRequest, PlacementDecision]] = {}
        self._supplies: dict[str, ClassSupply] = {}
        self.reservations = Reservations(capacity, replica_states, SurgeReservations(world))
        self.calibration = Calibration(self.changed)
        self.sizes = Sizes(world, capacity, replica_states, self.calibration)
        self.wanted: Callable[[Model], int] = modelstatus.first_wanted
        """How many replicas a Model is to have: the scaler says it."""
        self.backoffs: Callable[[str], Mapping[str, str]] = _none
        """Model's uid -> class -> why it is the last choice for now."""
        self._failed: dict[str, _Failed] = {}
        self._considered: dict[str, Considered] = {}
        self.wake: list[Callable[[str, float], None]] = []
        """Heard with a Model's key, and seconds after which it is early enough."""
        self._dirty = asyncio.Event()
        self._hurry = asyncio.Event()
        capacity.changed.append(self._dirty.set)
        world.deployments.listeners.append(self._deployment)
        world.pods.listeners.append(self._pod)
        world.classes.listeners.append(self._class)

    # --- what it works with -----------------------------------------------------------------------------------------

    def enter(self, request: PlacementRequest) -> None:
        """A Model's request, as of now."""
        model = request.model
        uid, before = model.metadata.uid, self._requests.get(model.metadata.uid)
        if request.same(before):
            return
        if before is not None and (before.model.spec != model.spec or not same_engines(before.pool, request.pool)):
            self.calibration.forget(uid)  # said by engines of another specification
        elif before is None:
            self.calibration.restore(model)
        self._requests[uid] = request
        self._dirty.set()

    def leave(self, uid: str) -> None:
        """The Model is gone."""
        if self._requests.pop(uid, None) is not None:
            self._dirty.set()
        self._decided.pop(uid, None)
        self.sizes.forget(uid)
        self._models.pop(uid, None)
        self._considered.pop(uid, None)
        self._failed.pop(uid, None)
        self.replica_states.forget(uid)
        self.calibration.forget(uid)

    def changed(self, *, hurry: bool = False) -> None:
        """Something was applied or has failed, or another number is wanted. `hurry`: somebody waits for it."""
        self._dirty.set()
        if hurry:
            self._hurry.set()

    def decided(self, request: PlacementRequest) -> PlacementDecision | None:
        """What was decided for exactly this request; None: not yet, `wake` will tell."""
        known = self._decided.get(request.model.metadata.uid)
        return known[1] if known is not None and request.same(known[0]) else None

    def latest(self, model_uid: str) -> PlacementDecision | None:
        """What was decided last, for whatever request."""
        known = self._decided.get(model_uid)
        return known[1] if known is not None else None

    def failed(self, model_uid: str) -> ModelProblem | None:
        """Why no plan is made for the Model, which keeps what it has; None: one is made."""
        known = self._failed.get(model_uid)
        return known.problem if known is not None else None

    def request(self, model_uid: str) -> PlacementRequest | None:
        """What the Model requests, as far as its reconcile has said."""
        return self._requests.get(model_uid)

    def considered(self, model_uid: str) -> Considered | None:
        """The classes that the Model may use, as they were last looked at."""
        return self._considered.get(model_uid)

    def target(self, model_uid: str, gpu_class: str, planned: int) -> int:
        """Replicas that a Deployment shall have, asked right before they are written: what was `planned` may be old by
        then."""
        known = self._decided.get(model_uid)
        now = known[1].placement.variants if known is not None else ()
        replicas = next((v.replicas for v in now if v.gpu_class == gpu_class), planned)
        return max(replicas, self.replica_states.reserved(model_uid, gpu_class))

    def reserve_surge(self, model_uid: str, gpu_class: str, gpus: int) -> bool:
        """Promises the GPUs of one further replica to a rollout, if there are any that nobody waits for."""
        decided = {uid: decision.placement for uid, (_, decision) in self._decided.items()}
        return self.reservations.reserve_surge(model_uid, gpu_class, gpus, self._supplies.get(gpu_class), decided)

    # --- what wakes it ----------------------------------------------------------------------------------------------

    def _deployment(self, _key: str, before: Child | None, after: Child | None) -> None:
        self._dirty.set()

    def _pod(self, _key: str, before: facts.Pod | None, after: facts.Pod | None) -> None:
        if (after or before) is not None and any(p is not None and p.model_uid for p in (before, after)):
            self._dirty.set()

    def _class(self, _key: str, before: Custom[GPUClass] | None, after: Custom[GPUClass] | None) -> None:
        self._dirty.set()

    # --- the plan ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Plans until cancelled. What was decided in an earlier term, perhaps long ago, counts no more."""
        self._decided.clear()
        self.replica_states.begin()
        self._dirty.set()
        while True:
            await self._until_dirty()
            await self._pause(SETTLE_SECONDS)
            self._dirty.clear()
            self._hurry.clear()
            took = await self._in_slices()
            SECONDS.observe(took)
            # Half of the time is others' in any case; for the rest nobody waits who is in a hurry.
            await asyncio.sleep(took)
            await self._pause(max(took * (SHARE - 2), PACE_SECONDS - SETTLE_SECONDS - 2 * took))

    async def _until_dirty(self) -> None:
        """Until something has changed, or a Model that could not be planned is to be tried again."""
        due = min((failed.until for failed in self._failed.values()), default=None)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if due is None else max(0.1, due - time.monotonic())):
                await self._dirty.wait()

    async def _pause(self, seconds: float) -> None:
        """Waits, unless somebody is in a hurry."""
        if seconds > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._hurry.wait()

    async def _in_slices(self) -> float:
        """Makes a plan, and gives others their turn meanwhile. Returns the seconds that it took by itself."""
        took, slices = 0.0, self._steps()
        try:
            while True:
                begin = time.monotonic()
                more = next(slices, False)
                while more and time.monotonic() - begin < SLICE_SECONDS:
                    more = next(slices, False)
                took += time.monotonic() - begin
                if not more:
                    return took
                await asyncio.sleep(0)
        except Exception:
            # What was decided before goes on; one that cannot be planned must not end the operator.
            log.exception("the fleet could not be planned; the last plan stays")
            return took

    def plan(self) -> None:
        """Makes the plan from what is known now, and wakes the Models whose part of it is another one."""
        for _ in self._steps():
            pass

    def _steps(self) -> Iterator[Literal[True]]:
        """A plan, with a stop wherever others may have their turn. It is of one moment: what is sized before and what
        is put into words after it cannot change it; what happens meanwhile makes the next plan."""
        classes = self._world.accepted_classes()
        self.sizes.refresh(classes)
        for request in tuple(self._requests.values()):
            self.sizes.computed(request, classes)
            yield True
        before = set(self._failed)
        self._try_again()
        moment = self._plan_input(self._world.accepted_classes())
        yield True
        steps = decide_steps(moment.fleet, time.monotonic())
        while True:
            try:
                next(steps)
            except StopIteration as end:
                found: FleetPlan = end.value
                break
            yield True
        for uid, error in found.failed.items():
            self._fail(moment.requests[uid], error)
        yield from self._adopt(moment, found)
        for uid in before ^ set(self._failed):
            if (request := self._requests.get(uid)) is not None:
                self._wake(request.model, 0.0)

    def _fail(self, request: PlacementRequest, error: BaseException) -> None:
        log.error("a Model cannot be planned; it keeps what it has", model=request.model.key, exc_info=error)
        problem = internal_error(error, "on the placement of this Model")
        self._failed[request.model.metadata.uid] = _Failed(request, problem, time.monotonic() + RETRY_SECONDS)

    def _try_again(self) -> None:
        now = time.monotonic()
        for uid, failed in list(self._failed.items()):
            request = self._requests.get(uid)
            if request is None or now >= failed.until or not request.same(failed.request):
                del self._failed[uid]

    def _wake(self, model: Model, seconds: float) -> None:
        for listener in self.wake:
            listener(model.key, seconds)

    def _plan_input(self, classes: Mapping[str, GPUClass]) -> _PlanInput:
        """What one plan is made of, all as of now."""
        self.sizes.refresh(classes)
        seen = self.replica_states.written_reservations()
        supplies = self._capacity.supplies()
        self._supplies = {supply.name: supply for supply in supplies}
        requests = {uid: request for uid, request in self._requests.items() if uid not in self._failed}
        looked: dict[str, Considered] = {}
        for uid, request in requests.items():
            with self._isolated(request):
                looked[uid] = self.sizes.proven(request, classes)
        self._considered = looked  # before anybody is asked: the first decision of a term reads which classes there are
        wanted: dict[str, int] = {}
        for uid in looked:
            with self._isolated(requests[uid]):
                wanted[uid] = self.wanted(requests[uid].model)
        models = [self._fleet_model(uid, requests[uid], looked[uid], number) for uid, number in wanted.items()]
        return _PlanInput(requests, FleetSnapshot(models, supplies, self._moves), seen)

    @contextlib.contextmanager
    def _isolated(self, request: PlacementRequest) -> Generator[None]:
        """What cannot be found out of one Model leaves it out of the plan."""
        try:
            yield
        except Exception as error:
            self._fail(request, error)

    def _fleet_model(self, uid: str, request: PlacementRequest, looked: Considered, wanted: int) -> FleetModel:
        """Most Models ask the same from one plan to the next: these stay the same object, and keep their demand. The
        input of a plan is taken in one stretch of work, for which every wake waits."""
        states, backoffs = self.replica_states.of(uid), self.backoffs(uid)
        known = self._models.get(uid)
        if (
            known is not None
            and known.model is request.model
            and known.considered is looked
            and known.replica_states is states
            and (known.replicas, known.backoffs, known.frozen) == (wanted, backoffs, request.role == "frozen")
            and known.preview == (request.facts is not None)
        ):
            return known
        found = self._models[uid] = FleetModel(
            request.model,
            looked,
            wanted,
            replica_states=states,
            backoffs=backoffs,
            frozen=request.role == "frozen",
            preview=request.facts is not None,
        )
        return found

    def _adopt(self, moment: _PlanInput, found: FleetPlan) -> Iterator[Literal[True]]:
        """Installs the plan. While it is installed, readers see the previous plan plus the reservations made since."""
        self._considered = {m.uid: m.considered for m in moment.fleet.models if m.uid in self._requests}
        for model in moment.fleet.models:
            decision = found.models.get(model.uid)
            if decision is not None and model.uid in self._requests:  # it may have been deleted meanwhile
                self._decide(model, decision, moment.requests[model.uid])
                yield True
        self.replica_states.planned(moment.reserved)
        decided = {uid: decision.placement for uid, (_, decision) in self._decided.items()}
        self.reservations.planned(decided, [decision.demand for decision in found.models.values()])
        self.sizes.measure()

    def _decide(self, model: FleetModel, decision: ModelDecision, request: PlacementRequest) -> None:
        uid, placement = model.uid, decision.placement
        part = PlacementDecision(placement, model.considered, decision.demand.wanted, _untried(decision.demand))
        known = self._decided.get(uid)
        if known is not None and known[0].same(request) and known[1] == part:
            # What is equal stays the same objects: thousands of new ones would be the garbage collector's to look at.
            if known[0] is not request:
                self._decided[uid] = (request, known[1])
            return
        self._decided[uid] = (request, part)
        urgent = known is None or not known[0].same(request) or known[1].placement.variants != placement.variants
        self._wake(request.model, 0.0 if urgent else MESSAGE_DELAY_SECONDS)
