"""The placement decision without a cluster: the operator's functions, with data from files."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Final, Literal

from shoal.api.artifact import ArtifactFacts
from shoal.api.config import OperatorConfig
from shoal.api.gpuclass import DEVICES_PREFIX, GPUClass
from shoal.api.lorapool import LoRAPool
from shoal.api.model import Model
from shoal.cli.explain.engines import OtherEngine, others
from shoal.cli.explain.inputs import Declared, ExplainedFleet
from shoal.core import candidates
from shoal.core.candidates import Considered, Tune
from shoal.core.devices import DeviceFacts, current, facts_of, match, offered
from shoal.core.facts import Node
from shoal.core.fleet import FleetModel, FleetSnapshot, decide
from shoal.core.gpus import held_by_node
from shoal.core.placement import ClassSupply, ClassUse, Moves, NodeSupply, Placement
from shoal.core.sizing import GPU, Sized, Tuning
from shoal.core.status import modelstatus
from shoal.engine.kinds import kind_of
from shoal.manifests.pool import applied, pool_problem
from shoal.manifests.shape import engine_problems, engine_row, engine_table, engine_version

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
    problems = {m.key: _problem(m, fleet, facts[m.key], config) for m in models_given}
    pools = {m.key: _pool(m, facts[m.key], config, declared) for m in models_given if not problems[m.key]}
    considered = {
        m.key: _consider(m, facts[m.key], fleet, gpus, config, pools[m.key][0])
        for m in models_given
        if not problems[m.key]
    }
    models = [
        _fleet_model(m, considered[m.key], position) for position, m in enumerate(models_given) if m.key in considered
    ]
    supplies = _supplies(fleet, members, models, {m.key for m in models_given})
    plan = decide(FleetSnapshot(() if fleet.built_in else models, supplies, Moves(in_flight=0)), now=0.0)
    for error in plan.failed.values():
        raise error
    by_key = {decision.demand.key: decision.placement for decision in plan.models.values()}
    reports = tuple(
        replace(
            _model(m, facts[m.key], problems[m.key], considered.get(m.key), by_key.get(m.key), fleet, context),
            pool=pools[m.key][0] if m.key in pools else None,
            pool_note=pools[m.key][1] if m.key in pools else "",
            others=_others(m, facts[m.key], fleet, gpus, pools[m.key][0], considered[m.key], by_key.get(m.key))
            if m.key in pools
            else (),
        )
        for m in models_given
    )
    return Report(
        reports,
        plan.classes if fleet.nodes is not None else {},
        _costs(reports),
        tuple(sorted({c.gpu_class for m in reports for c in m.classes if c.replicas and c.hourly_cost is None})),
    )


def _problem(model: Model, fleet: ExplainedFleet, facts: ArtifactFacts | str, config: OperatorConfig) -> str:
    version = engine_version(model, config)
    found = [
        p.message
        for p in modelstatus.problems(
            model,
            classes=fleet.classes,
            versions=tuple(engine_table(model, config).versions),
            version=version,
            argument_problems=kind_of(model).pod.extra_args_problems(version, model.spec.engine.extra_args),
            engine_problems=engine_problems(model, config, None if isinstance(facts, str) else facts),
            secret_missing=None,
        )
    ]
    sizing = model.spec.sizing
    enough = sizing.weight_bytes is not None and sizing.kv_bytes_per_token is not None
    return "; ".join([*found, *([facts] if isinstance(facts, str) and not enough else [])])


def _consider(
    model: Model,
    facts: ArtifactFacts | str,
    fleet: ExplainedFleet,
    gpus: Mapping[str, GPU],
    config: OperatorConfig,
    pool: LoRAPool | None,
) -> Considered:
    known = None if isinstance(facts, str) else facts
    return candidates.consider(model, known, fleet.classes, gpus, tune_for(model, config, known, pool))


def _others(
    model: Model,
    facts: ArtifactFacts | str,
    fleet: ExplainedFleet,
    gpus: Mapping[str, GPU],
    pool: LoRAPool | None,
    own: Considered,
    placement: Placement | None,
) -> tuple[OtherEngine, ...]:
    used = [v.gpu_class for v in placement.variants if v.replicas] if placement else []
    known = None if isinstance(facts, str) else facts
    return others(model, known, fleet.classes, gpus, pool, own, used)


def _pool(
    model: Model, facts: ArtifactFacts | str, config: OperatorConfig, declared: Declared
) -> tuple[LoRAPool | None, str]:
    """The pool of the Model's engines, and its description."""
    pool = declared.pool_of(model)
    if pool is None:
        return None, ""
    name = f"LoRAPool {pool.metadata.namespace}/{pool.metadata.name}"
    known = None if isinstance(facts, str) else facts
    if (problem := pool_problem(pool, model, known, config)) is not None:
        return None, f"{name} is left out: {problem.message}"
    used = applied(pool, model, known, config)
    if used is None:
        return None, f"{name} is left out: what its adapters need is not known without the facts of the weights"
    spec, others = pool.spec, [p for p in declared.pools if p.model_key == model.key and p is not pool]
    lost = "".join(
        f"; LoRAPool {p.metadata.namespace}/{p.metadata.name} comes too late: one pool per Model" for p in others
    )
    return used, (
        f"{name}: {spec.slots_per_replica} places for adapters of rank {spec.max_rank} on each replica, {spec.cached} "
        f"in its host memory; adapters in these files: {declared.adapters_of(pool)}{lost}"
    )


def tune_for(model: Model, config: OperatorConfig, facts: ArtifactFacts | None, pool: LoRAPool | None = None) -> Tune:
    """Memory-related tuning that follows from the engine's arguments."""
    row = engine_row(model, config)

    def tune(quantization: Literal["FP8"] | None) -> Tuning:
        env = {e.name: e.value for e in (*row.env, *model.spec.pod.env)}
        return kind_of(model).pod.tuning(
            model.spec.engine.extra_args,
            platform_args=row.args,
            quantization=quantization,
            env=env,
            pool=pool,
            facts=facts,
            engine=model.spec.engine,
        )

    return tune


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
    model: Model,
    facts: ArtifactFacts | str,
    problem: str,
    considered: Considered | None,
    placement: Placement | None,
    fleet: ExplainedFleet,
    context: int | None,
) -> ModelReport:
    known = None if isinstance(facts, str) else facts
    longest = context or model.spec.engine.context_length or (known.context_length if known else None)
    if considered is None:
        return ModelReport(model, known, (), None, problem, longest)
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
    return ModelReport(model, known, tuple(rows), placement, "", longest, note)


def currency(gpu_class: GPUClass) -> str | None:
    return gpu_class.spec.hourly_cost.currency if gpu_class.spec.hourly_cost else None


def _costs(reports: Sequence[ModelReport]) -> dict[str, Decimal]:
    costs: dict[str, Decimal] = {}
    for row in (row for report in reports for row in report.classes):
        if row.hourly_cost is not None and row.currency is not None and row.replicas:
            costs[row.currency] = costs.get(row.currency, Decimal(0)) + row.hourly_cost * row.replicas
    return costs
