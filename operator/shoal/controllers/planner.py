"""One plan for the whole fleet, made again when the world has changed; each Model's reconcile applies its part."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import prometheus_client
import structlog

from shoal.api import reasons
from shoal.api.artifact import ArtifactFacts
from shoal.api.gpuclass import GPUClass
from shoal.api.lorapool import LoRAPool
from shoal.api.model import Model
from shoal.controllers.calibration import Calibration
from shoal.controllers.capacity import Capacity
from shoal.controllers.promises import Promises
from shoal.controllers.standing import Standings
from shoal.controllers.surges import Surges
from shoal.controllers.world import World
from shoal.core import candidates, facts, models, quantity
from shoal.core.adapters.pool import same_engines
from shoal.core.candidates import Considered
from shoal.core.placement import ClassSupply, Demand, Moves, Placement, Rejected, parts, plan
from shoal.core.proven import keep_what_runs
from shoal.core.sizing import GPU, Sized, Tuning
from shoal.engine.launch import pool_args
from shoal.engine.tuning import tuning_of
from shoal.kube.projections import Child, Custom
from shoal.manifests.shape import engine_row

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
PATIENCE_SECONDS: Final = 3.0
"""A Model for which only the words have changed, such as how many GPUs are free elsewhere, is told so much later."""
SECONDS = prometheus_client.Histogram(
    "shoal_plan_seconds", "Duration of one plan of the whole fleet.", buckets=(0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 5)
)

Role = Literal["placed", "frozen"]
"""Whether a Model is to be placed, or keeps what it has: it is paused, not accepted, or its facts are not known."""


@dataclass(frozen=True, slots=True)
class Wish:
    """A Model as the planner counts with it."""

    model: Model
    facts: ArtifactFacts | None
    role: Role
    pool: LoRAPool | None = None
    """Whose adapters its engines serve."""

    def same(self, other: "Wish | None") -> bool:
        return (
            other is not None
            and self.role == other.role
            and (self.facts is other.facts or self.facts == other.facts)
            and self.model.metadata.uid == other.model.metadata.uid
            and (self.model is other.model or self.model.spec == other.model.spec)
            and same_engines(self.pool, other.pool)
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided for one Model."""

    placement: Placement
    considered: Considered
    wanted: int = 1
    """Replicas, as the scaler said."""
    untried: frozenset[str] = frozenset()
    """Classes that fit and on which the Model had no setback when this was decided."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a Model asked of the last plan, and from what that was made."""

    wish: Wish
    looked: Considered
    demand: Demand


@dataclass(frozen=True, slots=True)
class _Moment:
    """What one plan is made of."""

    wishes: Mapping[str, Wish]
    looked: Mapping[str, Considered]
    demands: Sequence[Demand]
    supplies: Sequence[ClassSupply]
    seen: Mapping[str, object]
    """What was asked for ahead of it and is in it: `Standings.seen_by_plan`."""


def _untried(demand: Demand) -> frozenset[str]:
    usable = (c.gpu_class for c in demand.candidates if c.max_replicas != 0)
    return frozenset(name for name in usable if name not in demand.setbacks)


def _none(_uid: str) -> Mapping[str, str]:
    return {}


class Planner:
    """`enter` what a Model wishes, `run` it, and read `decided`; `wake` hears the keys of Models whose part changed."""

    def __init__(self, world: World, capacity: Capacity, standings: Standings, moves: Moves) -> None:
        self._world, self._capacity, self.standings, self._moves = world, capacity, standings, moves
        self._wishes: dict[str, Wish] = {}
        self._considered: dict[str, tuple[Wish, int, Considered]] = {}
        self._demands: dict[str, _Asked] = {}
        self._decided: dict[str, tuple[Wish, Decision]] = {}
        self._gpus: dict[str, GPU] = {}
        self._costs: dict[str, object] = {}
        self._fleet = 0
        """Grows when a class is another one, as far as sizing and prices see it."""
        self._supplies: dict[str, ClassSupply] = {}
        self.promises = Promises(capacity, standings, Surges(world))
        self.calibration = Calibration(self.changed)
        self.wanted: Callable[[Model], int] = models.first_wanted
        """How many replicas a Model is to have: the scaler says it."""
        self.setbacks: Callable[[str], Mapping[str, str]] = _none
        """Model's uid -> class -> why it is the last choice for now."""
        self._looked: dict[str, Considered] = {}
        self.wake: list[Callable[[str, float], None]] = []
        """Heard with a Model's key, and seconds after which it is early enough."""
        self._dirty = asyncio.Event()
        self._hurry = asyncio.Event()
        capacity.changed.append(self._dirty.set)
        world.deployments.listeners.append(self._deployment)
        world.pods.listeners.append(self._pod)
        world.classes.listeners.append(self._class)

    # --- what it works with -----------------------------------------------------------------------------------------

    def enter(self, wish: Wish) -> None:
        """A Model's wish, as of now."""
        model = wish.model
        uid, before = model.metadata.uid, self._wishes.get(model.metadata.uid)
        if wish.same(before):
            return
        if before is not None and (before.model.spec != model.spec or not same_engines(before.pool, wish.pool)):
            self.calibration.forget(uid)  # said by engines of another specification
        elif before is None:
            self.calibration.remember(model)
        self._wishes[uid] = wish
        self._dirty.set()

    def leave(self, uid: str) -> None:
        """The Model is gone."""
        if self._wishes.pop(uid, None) is not None:
            self._dirty.set()
        self._decided.pop(uid, None)
        self._considered.pop(uid, None)
        self._demands.pop(uid, None)
        self._looked.pop(uid, None)
        self.standings.forget(uid)
        self.calibration.forget(uid)

    def changed(self, *, hurry: bool = False) -> None:
        """Something was applied or has failed, or another number is wanted. `hurry`: somebody waits for it."""
        self._dirty.set()
        if hurry:
            self._hurry.set()

    def decided(self, wish: Wish) -> Decision | None:
        """What was decided for exactly this wish; None: not yet, `wake` will tell."""
        known = self._decided.get(wish.model.metadata.uid)
        return known[1] if known is not None and wish.same(known[0]) else None

    def latest(self, model_uid: str) -> Decision | None:
        """What was decided last, for whatever wish."""
        known = self._decided.get(model_uid)
        return known[1] if known is not None else None

    def wish(self, model_uid: str) -> Wish | None:
        """What the Model wishes, as far as its reconcile has said."""
        return self._wishes.get(model_uid)

    def considered(self, model_uid: str) -> Considered | None:
        """The classes that the Model may use, as they were last looked at."""
        return self._looked.get(model_uid)

    def target(self, model_uid: str, gpu_class: str, planned: int) -> int:
        """Replicas that a Deployment shall have, asked right before they are written: what was `planned` may be old by
        then."""
        known = self._decided.get(model_uid)
        now = known[1].placement.variants if known is not None else ()
        replicas = next((v.replicas for v in now if v.gpu_class == gpu_class), planned)
        return max(replicas, self.standings.lifted(model_uid, gpu_class))

    def predicted(self, model_uid: str, gpu_class: str) -> int | None:
        """KV tokens of one replica, as computed."""
        found = self._sized(model_uid, gpu_class)
        return found[0].kv_tokens if found else None

    def _sized(self, model_uid: str, gpu_class: str) -> tuple[Sized, Tuning] | None:
        """The sums of a replica, and the engine's arguments that they are of."""
        known = self._considered.get(model_uid)
        sized = known[2].sized.get(gpu_class) if known else None
        if known is None or sized is None:
            return None
        variant = next((v for v in known[0].model.spec.variants if v.gpu_class == gpu_class), None)
        return sized, self._tune(known[0])(variant.quantization if variant else None)

    def may_surge(self, model_uid: str, gpu_class: str, gpus: int) -> bool:
        """Promises the GPUs of one further replica to a rollout, if there are any that nobody waits for."""
        decided = {uid: decision.placement for uid, (_, decision) in self._decided.items()}
        return self.promises.may_surge(model_uid, gpu_class, gpus, self._supplies.get(gpu_class), decided)

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
        self.standings.begin()
        self._dirty.set()
        while True:
            await self._dirty.wait()
            await self._pause(SETTLE_SECONDS)
            self._dirty.clear()
            self._hurry.clear()
            took = await self._in_slices()
            SECONDS.observe(took)
            # Half of the time is others' in any case; for the rest nobody waits who is in a hurry.
            await asyncio.sleep(took)
            await self._pause(max(took * (SHARE - 2), PACE_SECONDS - SETTLE_SECONDS - 2 * took))

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
        self._look_at(classes)
        for uid, wish in tuple(self._wishes.items()):
            self._consider(uid, wish, classes)
            yield True
        moment = self._moment(self._world.accepted_classes())
        yield True
        found: dict[str, Placement] = {}
        for part in parts(moment.demands, moment.supplies, moves=self._moves):
            found.update([part] if part is not None else ())
            yield True
        for demand in moment.demands:
            if demand.frozen and moment.wishes[demand.uid].facts is not None and not demand.standing:
                # Nothing of it runs, and nothing is kept for it: only what would be decided now is shown.
                found |= plan([replace(demand, frozen=False)], moment.supplies, moves=self._moves)
                yield True
        yield from self._take(moment, found)

    def _moment(self, classes: Mapping[str, GPUClass]) -> _Moment:
        """What one plan is made of, all as of now."""
        self._look_at(classes)
        seen = self.standings.seen_by_plan()
        supplies = self._capacity.supplies()
        self._supplies = {supply.name: supply for supply in supplies}
        looked = {
            uid: self._proven(uid, wish, self._consider(uid, wish, classes), classes)
            for uid, wish in self._wishes.items()
        }
        self._looked = looked  # before anybody is asked: the first decision of a term reads which classes there are
        wanted = {uid: self.wanted(wish.model) for uid, wish in self._wishes.items()}
        demands = [self._demand(uid, wish, looked[uid], wanted[uid]) for uid, wish in self._wishes.items()]
        return _Moment(dict(self._wishes), looked, demands, supplies, seen)

    def _demand(self, uid: str, wish: Wish, looked: Considered, wanted: int) -> Demand:
        """Most Models ask the same from one plan to the next, and a moment is one stretch of work: who wakes waits."""
        standing, setbacks = self.standings.of(uid), self.setbacks(uid)
        known = self._demands.get(uid)
        if (
            known is not None
            and known.wish is wish
            and known.looked is looked
            and known.demand.standing is standing
            and (known.demand.wanted, known.demand.setbacks) == (wanted, setbacks)
        ):
            return known.demand
        found = candidates.demand(
            wish.model,
            looked,
            wanted=wanted,
            minimum=models.minimum(wish.model),
            standing=standing,
            setbacks=setbacks,
            frozen=wish.role == "frozen",
        )
        self._demands[uid] = _Asked(wish, looked, found)
        return found

    def _take(self, moment: _Moment, found: Mapping[str, Placement]) -> Iterator[Literal[True]]:
        """The plan counts from now on. Who asks while it is being taken gets what was decided last for each Model, with
        what was lifted since."""
        self._looked = {uid: looked for uid, looked in moment.looked.items() if uid in self._wishes}
        for demand in moment.demands:
            placement = found.get(demand.uid)
            if placement is not None and demand.uid in self._wishes:  # it may have gone meanwhile
                self._decide(demand, placement, moment)
                yield True
        self.standings.planned(moment.seen)
        decided = {uid: decision.placement for uid, (_, decision) in self._decided.items()}
        self.promises.planned(decided, moment.demands)
        self.calibration.measure(self._gpus, self._sized)

    def _decide(self, demand: Demand, placement: Placement, moment: _Moment) -> None:
        uid, wish = demand.uid, moment.wishes[demand.uid]
        part = Decision(placement, moment.looked[uid], demand.wanted, _untried(demand))
        known = self._decided.get(uid)
        if known is not None and known[0].same(wish) and known[1] == part:
            # What is equal stays the same objects: thousands of new ones would be the garbage collector's to look at.
            if known[0] is not wish:
                self._decided[uid] = (wish, known[1])
            return
        self._decided[uid] = (wish, part)
        urgent = known is None or not known[0].same(wish) or known[1].placement.variants != placement.variants
        for listener in self.wake:
            listener(wish.model.key, 0.0 if urgent else PATIENCE_SECONDS)

    def _look_at(self, classes: Mapping[str, GPUClass]) -> None:
        gpus = self._capacity.gpus()
        costs: dict[str, object] = {
            name: (c.spec.hourly_cost, c.spec.interruptible, c.spec.tolerations) for name, c in classes.items()
        }
        if gpus != self._gpus or costs != self._costs:
            self._gpus, self._costs = gpus, costs
            self._fleet += 1

    def _consider(self, uid: str, wish: Wish, classes: Mapping[str, GPUClass]) -> Considered:
        known = self._considered.get(uid)
        if known is not None and known[1] == self._fleet and known[0].same(wish):
            return known[2]
        try:
            found = candidates.consider(wish.model, wish.facts, classes, self._gpus, self._tune(wish))
        except (ValueError, ArithmeticError) as error:
            # A figure that nobody foresaw is this Model's problem, not that of the fleet.
            log.warning("a Model cannot be sized", model=wish.model.key, error=str(error))
            why = f"the sums of this model do not work out: {error}"
            found = Considered((), tuple(Rejected(name, reasons.SIZE_UNKNOWN, why) for name in sorted(classes)), {})
        self._considered[uid] = (wish, self._fleet, found)
        return found

    def _proven(self, uid: str, wish: Wish, considered: Considered, classes: Mapping[str, GPUClass]) -> Considered:
        """An engine's own figure wins over what is computed: see `keep_what_runs`."""
        told = self.calibration.tokens(uid)
        if not told:
            return considered
        spec = wish.model.spec
        named = {v.gpu_class for v in spec.variants if v.tensor}
        said = {
            name: tokens
            for name, tokens in told.items()
            if name not in named and spec.engine.parallelism.tensor is None and name in classes
        }
        if not said:
            return considered
        prices = {n: c.spec.hourly_cost for n in said if (c := classes[n])}
        return keep_what_runs(
            considered,
            self.standings.of(uid),
            said,
            context_length=spec.engine.context_length or (wish.facts.context_length if wish.facts else None),
            hourly_cost={n: quantity.parse(p.amount) if p else None for n, p in prices.items()},
            max_replicas={v.gpu_class: v.max_replicas for v in spec.variants},
            interruptible={n: classes[n].spec.interruptible for n in said},
        )

    def _tune(self, wish: Wish) -> Callable[[Literal["FP8"] | None], Tuning]:
        model = wish.model
        args = [*pool_args(wish.pool), *model.spec.engine.extra_args]
        try:
            platform = engine_row(model, self._world.config).args
        except KeyError:  # a version that is not in the table: the Model is not accepted
            platform = ()
        env = {e.name: e.value for e in model.spec.pod.env}
        return lambda quantization: tuning_of(args, platform_args=platform, quantization=quantization, env=env)
