"""The whole fleet in one call: how many replicas each Model has, and on which GPU classes they run.

    plan = decide(FleetSnapshot(models, supplies), now)

1. Replicas (`core/scaling`): each Model whose number is not decided yet, from what its replicas and gateways report.
2. Placement (`core/placement`): all Models together on the free GPUs, so that no GPU is given away twice.

The operator, `shoal explain`, `shoal render` and tests call this. The operator decides a Model's replicas when one of
its signals changes and passes the number; it runs `decide_steps`, so that a wake does not wait for a whole plan.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import Final

from shoal.api.model import Model
from shoal.core import candidates
from shoal.core.candidates import Considered
from shoal.core.placement import ClassSupply, ClassUse, Demand, Moves, Placement, ReplicaState, Unplannable, parts, plan
from shoal.core.scaling import ModelSnapshot, ScalingDecision, ScalingMemory
from shoal.core.scaling import decide as decide_replicas
from shoal.core.status import modelstatus

_NOTHING_RUNS: Final[Mapping[str, ReplicaState]] = {}


@dataclass(frozen=True)
class FleetModel:
    """One Model, as a plan of the fleet reads it. A caller that keeps the object from one plan to the next, because the
    Model did not change, keeps its `demand` too: that makes a plan of thousands of Models cheap."""

    model: Model
    considered: Considered
    """The GPU classes that a replica fits on, and those that it does not."""
    replicas: int | ModelSnapshot
    """How many replicas the Model is to have; or what its signals report, from which this call decides the number."""
    memory: ScalingMemory | None = None
    """What the last decision on its replicas remembered. Unused where the number is given."""
    replica_states: Mapping[str, ReplicaState] = field(default_factory=lambda: _NOTHING_RUNS)
    """GPU class -> what runs there, is about to be applied, or is reserved."""
    backoffs: Mapping[str, str] = field(default_factory=dict[str, str])
    """GPU class -> why it is the last choice for now."""
    crashes: frozenset[str] = frozenset()
    """Of `backoffs`: GPU classes where its engine ends again and again."""
    lacks_surge: frozenset[str] = frozenset()
    """GPU classes where a rollout waits for a GPU."""
    frozen: bool = False
    """The Model keeps exactly what it has: it is paused, not accepted, or the facts of its weights are unknown."""
    preview: bool = False
    """Where the Model is frozen and nothing of it runs: show where it would go. It takes no GPU from others."""
    created: datetime | None = None
    """Its age among Models of one priority, where the object carries none (a file)."""

    @property
    def uid(self) -> str:
        return self.model.metadata.uid or self.model.key

    @cached_property
    def demand(self) -> Demand:
        """What the Model asks of placement. The number of replicas is 0 until it is decided."""
        return candidates.demand(
            self.model,
            self.considered,
            wanted=self.replicas if isinstance(self.replicas, int) else 0,
            minimum=modelstatus.minimum(self.model),
            created=self.created,
            replica_states=self.replica_states,
            backoffs=self.backoffs,
            crashes=self.crashes,
            lacks_surge=self.lacks_surge,
            frozen=self.frozen,
        )


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """Everything that a plan of the fleet reads."""

    models: Sequence[FleetModel]
    supplies: Sequence[ClassSupply]
    """GPU classes with their nodes."""
    moves: Moves = field(default_factory=Moves)
    """How fast replicas may move to cheaper classes."""


@dataclass(frozen=True, slots=True)
class ModelDecision:
    """What was decided for one Model."""

    demand: Demand
    placement: Placement
    scaling: ScalingDecision | None = None
    """Why it has as many replicas; None: the snapshot gave the number."""
    memory: ScalingMemory | None = None
    """To be passed to the next decision on its replicas."""


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """What was decided for the whole fleet."""

    models: Mapping[str, ModelDecision]
    """Model's uid -> decision. Models in `failed` are not in it."""
    classes: Mapping[str, ClassUse]
    """GPU class -> what the plan leaves of it."""
    failed: Mapping[str, BaseException]
    """Model's uid -> the error in which its part of the plan ended. The others are planned without it."""

    @property
    def missing(self) -> Mapping[str, int]:
        """namespace/name -> replicas for which there is no capacity, of the Models that lack some."""
        return {d.demand.key: d.placement.missing for d in self.models.values() if d.placement.missing}


def decide(snapshot: FleetSnapshot, now: float) -> FleetPlan:
    """Replicas and placement of every Model at `now` (seconds of the clock that the snapshot's times are of)."""
    steps = decide_steps(snapshot, now)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def decide_steps(snapshot: FleetSnapshot, now: float) -> Generator[None, None, FleetPlan]:
    """`decide` in steps of few milliseconds at most: the caller may do something else between two."""
    failed: dict[str, BaseException] = {}
    scaled: dict[str, tuple[ScalingDecision, ScalingMemory]] = {}
    demands: dict[str, Demand] = {}
    for model in snapshot.models:
        try:
            demand = model.demand
            if isinstance(model.replicas, ModelSnapshot):
                scaled[demand.uid] = decide_replicas(model.replicas, model.memory, now)
                demand = replace(demand, wanted=scaled[demand.uid][0].wanted)
                yield
            demands[demand.uid] = demand
        except Exception as error:
            # What cannot be found out of one Model leaves that one out of the plan, and no other.
            failed[model.uid] = error
    yield
    while True:
        try:
            placements, classes = yield from _placed([*demands.values()], snapshot)
            for model in snapshot.models:
                demand = demands.get(model.uid) if model.preview else None
                if demand is not None and demand.frozen and not demand.replica_states:
                    placements |= plan([replace(demand, frozen=False)], snapshot.supplies, moves=snapshot.moves)
                    yield
            break
        except Unplannable as error:
            failed[error.uid] = error.__cause__ or error
            del demands[error.uid]
    return FleetPlan(
        models={
            uid: ModelDecision(demands[uid], placement, *scaled.get(uid, (None, None)))
            for uid, placement in placements.items()
        },
        classes=classes,
        failed=failed,
    )


def _placed(
    demands: Sequence[Demand], snapshot: FleetSnapshot
) -> Generator[None, None, tuple[dict[str, Placement], Mapping[str, ClassUse]]]:
    """Raises Unplannable."""
    found: dict[str, Placement] = {}
    steps = parts(demands, snapshot.supplies, moves=snapshot.moves)
    while True:
        try:
            part = next(steps)
        except StopIteration as end:
            return found, end.value
        found.update([part] if part is not None else ())
        yield
