"""The placement decision without a cluster: the operator's functions, with data from files."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Final

from shoal.api.artifact import ArtifactFacts
from shoal.api.config import OperatorConfig
from shoal.api.gpuclass import DEVICES_PREFIX, GPUClass
from shoal.api.lorapool import LoRAPool
from shoal.api.model import Model
from shoal.cli.explain.engines import OtherEngine, others
from shoal.cli.explain.inputs import Declared, ExplainedFleet
from shoal.cli.explain.onengine import OnEngine, PlacementInputs, on_engine
from shoal.core import candidates
from shoal.core.candidates import Considered
from shoal.core.devices import DeviceFacts, current, facts_of, match, offered
from shoal.core.facts import Node
from shoal.core.fleet import FleetModel, FleetSnapshot, decide
from shoal.core.gpus import held_by_node
from shoal.core.placement import ClassSupply, ClassUse, Moves, NodeSupply, Placement
from shoal.core.sizing import Sized
from shoal.core.status import modelstatus

NODE_GPUS: Final = 8
"""GPUs per node when no file contains Nodes: those of the usual server."""
MOST_NODES: Final = 20_000
"""Assumed nodes per class at most, when no file contains Nodes."""
_LAST: Final = datetime(9000, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class ClassReport:
    """One GPU class from the view of one Model."""

    gpu_class: str
    replicas: int
    """Replicas placed on this class."""
    waiting: int
    """Part of `replicas` that has no GPUs yet."""
    sized: Sized | None
    """None: a replica does not fit."""
    hourly_cost: Decimal | None
    """Cost of one replica per hour; None: the class has no price."""
    currency: str | None
    reason: str
    """Reason why the class is not used; empty: it is used."""
    why: str


@dataclass(frozen=True, slots=True)
class ModelReport:
    """One Model: its facts and its placement."""

    model: Model
    facts: ArtifactFacts | None
    classes: tuple[ClassReport, ...]
    placement: Placement | None
    """None: no class was chosen, because of `problem`, or because the catalogue has no prices."""
    problem: str
    """Why no placement was attempted."""
    context: int | None
    """Request length in tokens that concurrency is computed for."""
    note: str = ""
    """Why the facts of the weights are unknown, if spec.sizing suffices without them."""
    pool: LoRAPool | None = None
    """Pool whose adapters the Model's engines serve."""
    pool_note: str = ""
    """Description of the pool; empty: there is none."""
    others: tuple[OtherEngine, ...] = ()
    """The Model on the other engines."""

    @property
    def placed(self) -> bool:
        """Whether all replicas have GPUs; with the catalogue, whether any class is large enough."""
        if self.placement is None:
            return any(row.sized for row in self.classes)
        return self.placement.placed


@dataclass(frozen=True, slots=True)
class Report:
    """The output of `shoal explain`."""

    models: tuple[ModelReport, ...]
    use: Mapping[str, ClassUse]
    """GPU class -> its use with the Models placed. Empty without Nodes."""
    costs: Mapping[str, Decimal]
    """Currency -> cost per hour of the placed replicas."""
    unpriced: tuple[str, ...]
    """Used classes that have no price."""

    @property
    def all_placed(self) -> bool:
        return all(m.placed for m in self.models)


def explain(
    declared: Declared,
    fleet: ExplainedFleet,
    facts: Mapping[str, ArtifactFacts | str],
    config: OperatorConfig,
    context: int | None,
) -> Report:
    """Places the Models together on the fleet, as if none of them were running.

    `facts` are by Model; a string says why they are unknown. `context` is the request length in tokens; None: each
    Model's longest.
    """
    offers, devices = _devices(fleet, {m.key for m in declared.models})
    members = candidates.members(fleet.classes.values(), fleet.nodes or (), offers)
    gpus = candidates.gpus_of(fleet.classes.values(), members, devices)
    models_given = declared.models
    inputs = PlacementInputs(declared, fleet, gpus, config)
    found = {m.key: on_engine(m, facts[m.key], inputs) for m in models_given}
    models = [
        _fleet_model(m, found[m.key].considered, position)
        for position, m in enumerate(models_given)
        if not found[m.key].problems
    ]
    supplies = _supplies(fleet, members, models, {m.key for m in models_given})
    plan = decide(FleetSnapshot(() if fleet.built_in else models, supplies, Moves(in_flight=0)), now=0.0)
    for error in plan.failed.values():
        raise error
    by_key = {decision.demand.key: decision.placement for decision in plan.models.values()}
    reports = tuple(
        replace(
            _model(found[m.key], facts[m.key], by_key.get(m.key), fleet, context),
            others=others(found[m.key], facts[m.key], inputs, _used(by_key.get(m.key))),
        )
        for m in models_given
    )
    return Report(
        reports,
        plan.classes if fleet.nodes is not None else {},
        _costs(reports),
        tuple(sorted({c.gpu_class for m in reports for c in m.classes if c.replicas and c.hourly_cost is None})),
    )


def _used(placement: Placement | None) -> list[str]:
    return [v.gpu_class for v in placement.variants if v.replicas] if placement else []


def _fleet_model(model: Model, considered: Considered, position: int) -> FleetModel:
    """A Model of the snapshot. Models without an age count as created in the order of the files."""
    created = _LAST + timedelta(seconds=position)
    return FleetModel(model, considered, modelstatus.first_wanted(model), created=created)


def _devices(fleet: ExplainedFleet, given: Set[str]) -> tuple[candidates.Offers, Mapping[str, DeviceFacts]]:
    """Class with devices -> node -> its devices and those that are free; and what the devices say of themselves. Those
    of pods of the `given` Models are free: these are placed anew."""
    pools, incomplete = current(fleet.slices)
    labels = {node.name: node.labels for node in fleet.nodes or ()}
    found = match(fleet.classes.values(), {c.name: c for c in fleet.device_classes}, pools, incomplete, labels)
    allocated = {
        device
        for claim in fleet.claims
        if not any(fleet.owners.get(f"{claim.namespace}/{pod}") in given for pod, _ in claim.pods)
        for device in claim.devices
    }
    offers = {
        name: {node: (n.capacity, n.offered) for node, n in offered(of, pools, allocated, frozenset()).items()}
        for name, of in found.items()
    }
    facts = {name: facts_of((m.id.driver, m.device) for m in of.devices) for name, of in found.items()}
    return offers, {name: of for name, of in facts.items() if of is not None}


def _supplies(
    fleet: ExplainedFleet, members: Mapping[str, tuple[Node, ...]], models: Sequence[FleetModel], models_given: Set[str]
) -> tuple[ClassSupply, ...]:
    """GPUs available per class. Pods of other Models and foreign pods hold theirs; the given Models are placed anew."""
    if fleet.nodes is not None:
        others = [p for p in fleet.pods if fleet.owners.get(p.key) not in models_given]
        # What pods have of devices is not offered at all.
        held = {at: n for at, n in held_by_node(others).items() if not at[1].startswith(DEVICES_PREFIX)}
        going = held_by_node(p for p in others if p.deleting)
        return candidates.supplies(fleet.classes.values(), members, held, going)
    needed = dict.fromkeys(fleet.classes, 0)
    for demand in (model.demand for model in models):
        for candidate in demand.candidates:
            needed[candidate.gpu_class] += -(-demand.wanted // max(1, NODE_GPUS // candidate.gpus))
    return tuple(
        ClassSupply(name, tuple(NodeSupply(f"{name}-{i}", NODE_GPUS, NODE_GPUS) for i in range(min(nodes, MOST_NODES))))
        for name, nodes in sorted(needed.items())
    )


def _model(
    found: OnEngine,
    facts: ArtifactFacts | str,
    placement: Placement | None,
    fleet: ExplainedFleet,
    context: int | None,
) -> ModelReport:
    model, considered = found.model, found.considered
    known = None if isinstance(facts, str) else facts
    longest = context or model.spec.engine.context_length or (known.context_length if known else None)
    if found.problems:
        return ModelReport(model, known, (), None, "; ".join(found.problems), longest)
    used = {v.gpu_class: v for v in placement.variants if v.replicas} if placement else {}
    excluded = {e.gpu_class: e for e in placement.excluded} if placement else {}
    rejected = {r.gpu_class: r for r in considered.rejected}

    def report(name: str, cost: Decimal | None) -> ClassReport:
        variant, out = used.get(name), excluded.get(name) or rejected.get(name)
        return ClassReport(
            name,
            replicas=variant.replicas if variant else 0,
            waiting=variant.waiting if variant else 0,
            sized=considered.sized.get(name),
            hourly_cost=cost,
            currency=currency(fleet.classes[name]) if name in fleet.classes else None,
            reason="" if variant or out is None else out.reason,
            why="" if variant or out is None else out.why,
        )

    by_cost = sorted(considered.candidates, key=lambda c: (c.hourly_cost is None, c.hourly_cost or 0, c.gpu_class))
    rows = [report(c.gpu_class, c.hourly_cost) for c in by_cost] + [report(name, None) for name in rejected]
    note = f"sized without the facts of the weights: {facts}" if isinstance(facts, str) else ""
    return ModelReport(model, known, tuple(rows), placement, "", longest, note, found.pool.used, found.pool.note)


def currency(gpu_class: GPUClass) -> str | None:
    return gpu_class.spec.hourly_cost.currency if gpu_class.spec.hourly_cost else None


def _costs(reports: Sequence[ModelReport]) -> dict[str, Decimal]:
    costs: dict[str, Decimal] = {}
    for row in (row for report in reports for row in report.classes):
        if row.hourly_cost is not None and row.currency is not None and row.replicas:
            costs[row.currency] = costs.get(row.currency, Decimal(0)) + row.hourly_cost * row.replicas
    return costs
