"""One plan for the whole fleet, made again when the world has changed; each Model's reconcile applies its part."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Container, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import prometheus_client
import structlog

from shoal.api.gpuclass import GPUClass
from shoal.api.model import Model
from shoal.controllers.calibration import Calibration
from shoal.controllers.isolation import internal_error
from shoal.controllers.placementrequest import PlacementDecision, PlacementRequest
from shoal.controllers.reservations import Reservation
from shoal.controllers.sizes import Sizes
from shoal.controllers.state import FleetState, ModelRecord, PlanFailure
from shoal.controllers.world import World
from shoal.core.candidates import Considered
from shoal.core.fleet import FleetModel, FleetPlan, FleetSnapshot, ModelDecision, decide_steps
from shoal.core.placement import Demand, Moves

log = structlog.get_logger()

SETTLE_SECONDS: Final = 0.1
"""Changes come in bunches: one plan for all of a bunch."""
PACE_SECONDS: Final = 0.3
"""From one plan to the next at least."""
SHARE: Final = 5
"""A plan that takes long makes the next one wait, so that planning takes at most this fraction of the time; half of it
while a plan is urgent."""
SLICE_SECONDS: Final = 0.002
"""Seconds of one slice of a plan, so that a wake does not wait for a whole plan."""
MESSAGE_DELAY_SECONDS: Final = 3.0
"""Delay of a reconcile where only a message has changed, such as how many GPUs are free elsewhere."""
RETRY_SECONDS: Final = 60.0
"""A Model whose part of the plan ends in an error is left out of plans for this time, unless its request changes."""
SECONDS = prometheus_client.Histogram(
    "shoal_plan_seconds", "Duration of one plan of the whole fleet.", buckets=(0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 5)
)


@dataclass(frozen=True, slots=True)
class _PlanInput:
    """What one plan is made of."""

    requests: Mapping[str, PlacementRequest]
    fleet: FleetSnapshot
    wakes: tuple[Reservation, ...]
    """Wake reservations that the plan reads as replicas of Deployments."""


def _untried(demand: Demand, outages: Container[str]) -> frozenset[str]:
    states = demand.replica_states
    usable = (c.gpu_class for c in demand.candidates if c.max_replicas != 0)
    return frozenset(
        name
        for name in usable
        if name not in demand.backoffs
        and (name not in outages or (name in states and states[name].bound))
        and not (name in states and states[name].rejected)
    )


class Planner:
    """Plans the whole fleet from `FleetState`, and writes its decisions there. `run` while this operator leads."""

    def __init__(
        self,
        world: World,
        state: FleetState,
        wanted: Callable[[Model], int],
        decided: Callable[[str, float], None],
        moves: Moves,
    ) -> None:
        """`wanted`: how many replicas a Model is to have. `decided` is called with the key of a Model whose part of the
        plan changed, and the delay in seconds that its reconcile may have."""
        self._world, self._state, self._wanted, self._decided, self._moves = world, state, wanted, decided, moves
        self.calibration = Calibration(state)
        self.sizes = Sizes(world, state, self.calibration)

    # --- the plan ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Plans until cancelled."""
        self._state.begin_term()
        while True:
            await self._until_due()
            await self._pause(SETTLE_SECONDS)
            self._state.plan_due.clear()
            self._state.plan_urgent.clear()
            took = await self._in_slices()
            SECONDS.observe(took)
            # Half of the time is others' in any case; for the rest nobody waits who is in a hurry.
            await asyncio.sleep(took)
            await self._pause(max(took * (SHARE - 2), PACE_SECONDS - SETTLE_SECONDS - 2 * took))

    async def _until_due(self) -> None:
        """Until something has changed, or a Model that could not be planned is to be tried again."""
        failures = (record.plan_failure for _, record in self._state.records())
        due = min((failure.until for failure in failures if failure is not None), default=None)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if due is None else max(0.1, due - time.monotonic())):
                await self._state.plan_due.wait()

    async def _pause(self, seconds: float) -> None:
        """Waits, unless a plan is urgent."""
        if seconds > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._state.plan_urgent.wait()

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
        """A plan, with a stop wherever others may have their turn. It is of one moment: what is sized before and which
        messages are written after it cannot change it; what happens meanwhile makes the next plan."""
        classes = self._world.accepted_classes()
        self.sizes.refresh(classes)
        for _, record in self._state.records():
            if record.request is not None:
                self.sizes.computed(record.request, classes)
                yield True
        before = self._failed()
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
        for uid in before ^ self._failed():
            if (request := self._state.record(uid).request) is not None:
                self._decided(request.model.key, 0.0)

    def _failed(self) -> set[str]:
        return {uid for uid, record in self._state.records() if record.plan_failure is not None}

    def _fail(self, request: PlacementRequest, error: BaseException) -> None:
        log.error("a Model cannot be planned; it keeps what it has", model=request.model.key, exc_info=error)
        problem = internal_error(error, "on the placement of this Model")
        record = self._state.record(request.model.metadata.uid)
        record.considered = None
        record.plan_failure = PlanFailure(request, problem, time.monotonic() + RETRY_SECONDS)

    def _try_again(self) -> None:
        now = time.monotonic()
        for _, record in self._state.records():
            failed = record.plan_failure
            if failed is not None and (
                record.request is None or now >= failed.until or not record.request.same(failed.request)
            ):
                record.plan_failure = None

    def _plan_input(self, classes: Mapping[str, GPUClass]) -> _PlanInput:
        """What one plan is made of, all as of now."""
        self.sizes.refresh(classes)
        wakes, supplies = self._state.written_wakes(), self._state.supplies()
        records = dict(self._state.records())
        requests = {uid: r.request for uid, r in records.items() if r.request is not None and r.plan_failure is None}
        # All before the first number is asked for: the first decision of a term reads which classes there are.
        for uid, request in requests.items():
            records[uid].considered = None
            with self._isolated(request):
                records[uid].considered = self.sizes.proven(request, classes)
        models: list[FleetModel] = []
        for uid, request in requests.items():
            if (considered := records[uid].considered) is not None:
                with self._isolated(request):
                    models.append(self._fleet_model(records[uid], request, considered, self._wanted(request.model)))
        return _PlanInput(requests, FleetSnapshot(models, supplies, self._moves), wakes)

    @contextlib.contextmanager
    def _isolated(self, request: PlacementRequest) -> Generator[None]:
        """What cannot be found out of one Model leaves it out of the plan."""
        try:
            yield
        except Exception as error:
            self._fail(request, error)

    def _fleet_model(
        self, record: ModelRecord, request: PlacementRequest, considered: Considered, wanted: int
    ) -> FleetModel:
        """Most Models ask the same from one plan to the next: these stay the same object, and keep their demand. The
        input of a plan is taken in one stretch of work, for which every wake waits."""
        states = self._state.replica_states(request.model.metadata.uid)
        backoffs, crashes, known = record.backoff_reasons, record.crashes, record.planned
        if (
            known is not None
            and known.model is request.model
            and known.considered is considered
            and known.replica_states is states
            and (known.replicas, known.backoffs, known.frozen) == (wanted, backoffs, request.role == "frozen")
            and (known.crashes, known.lacks_surge) == (crashes, record.lacks_surge)
            and known.preview == (request.facts is not None)
        ):
            return known
        record.planned = FleetModel(
            request.model,
            considered,
            wanted,
            replica_states=states,
            backoffs=backoffs,
            crashes=crashes,
            lacks_surge=record.lacks_surge,
            frozen=request.role == "frozen",
            preview=request.facts is not None,
        )
        return record.planned

    def _adopt(self, moment: _PlanInput, plan: FleetPlan) -> Iterator[Literal[True]]:
        """Installs the plan. While it is installed, readers see the previous plan plus the reservations made since."""
        for model in moment.fleet.models:
            decision, record = plan.models.get(model.uid), self._state.record(model.uid)
            if decision is not None and record.request is not None:  # it may have been deleted meanwhile
                self._install(record, model, decision, moment.requests[model.uid])
                yield True
        self._state.planned(plan, moment.wakes)
        self.sizes.measure()

    def _install(
        self, record: ModelRecord, model: FleetModel, decision: ModelDecision, request: PlacementRequest
    ) -> None:
        placement = decision.placement
        part = PlacementDecision(
            placement,
            model.considered,
            decision.demand.wanted,
            _untried(decision.demand, self._state.outages),
            decision.demand.lacks_surge,
        )
        known = record.decided
        if known is not None and known[0].same(request) and known[1] == part:
            # What is equal stays the same objects: thousands of new ones would be the garbage collector's to look at.
            if known[0] is not request:
                record.decided = (request, known[1])
            return
        record.decided = (request, part)
        urgent = (
            known is None
            or not known[0].same(request)
            or known[1].placement.variants != placement.variants
            or known[1].lacks_surge != part.lacks_surge
        )
        self._decided(request.model.key, 0.0 if urgent else MESSAGE_DELAY_SECONDS)
