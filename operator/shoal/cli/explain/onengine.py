"""A Model on its engine, before it is placed: what is wrong with it, which pool it gets, and where it fits."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from shoal.api.artifact import ArtifactFacts
from shoal.api.config import OperatorConfig
from shoal.api.lorapool import LoRAPool
from shoal.api.model import Model
from shoal.cli.explain.inputs import Declared, ExplainedFleet
from shoal.core import candidates
from shoal.core.candidates import Considered, Tune
from shoal.core.sizing import GPU, Tuning
from shoal.core.status import modelstatus
from shoal.engine.kinds import kind_of
from shoal.manifests.pool import applied, pool_problem
from shoal.manifests.shape import engine_problems, engine_row, engine_table, engine_version

NOWHERE: Final = Considered((), (), {})


@dataclass(frozen=True, slots=True)
class PlacementInputs:
    """Where Models are placed, and what is declared beside them."""

    declared: Declared
    fleet: ExplainedFleet
    gpus: Mapping[str, GPU]
    """GPU class -> its GPUs."""
    config: OperatorConfig


@dataclass(frozen=True, slots=True)
class PoolOnEngine:
    """The LoRAPool of a Model on its engine."""

    name: str = ""
    """`LoRAPool namespace/name`; empty: there is none."""
    used: LoRAPool | None = None
    """Pool whose adapters the engines serve; None: there is none, or it is left out."""
    refused: str = ""
    """Why the engines cannot serve it; empty: they can, or it is not known."""
    note: str = ""
    """Description of the pool, or why it is left out."""


@dataclass(frozen=True, slots=True)
class OnEngine:
    """A Model with the type of engine that it names."""

    model: Model
    problems: tuple[str, ...]
    """Why the Model is not looked at."""
    pool: PoolOnEngine
    considered: Considered
    """Where a replica fits; nowhere, if there are problems."""


def on_engine(model: Model, facts: ArtifactFacts | str, inputs: PlacementInputs) -> OnEngine:
    """Looks at the Model; `facts` as a string says why they are unknown."""
    if problems := _problems(model, facts, inputs):
        return OnEngine(model, problems, PoolOnEngine(), NOWHERE)
    known = None if isinstance(facts, str) else facts
    pool = _pool(model, known, inputs)
    tune = _tune(model, known, inputs.config, pool.used)
    return OnEngine(model, (), pool, candidates.consider(model, known, inputs.fleet.classes, inputs.gpus, tune))


def _problems(model: Model, facts: ArtifactFacts | str, inputs: PlacementInputs) -> tuple[str, ...]:
    config, version = inputs.config, engine_version(model, inputs.config)
    found = modelstatus.problems(
        model,
        classes=inputs.fleet.classes,
        versions=tuple(engine_table(model, config).versions),
        version=version,
        argument_problems=kind_of(model).pod.extra_args_problems(version, model.spec.engine.extra_args),
        engine_problems=engine_problems(model, config, None if isinstance(facts, str) else facts),
        secret_missing=None,
    )
    sizing = model.spec.sizing
    enough = sizing.weight_bytes is not None and sizing.kv_bytes_per_token is not None
    return (*(p.message for p in found), *([facts] if isinstance(facts, str) and not enough else []))


def _pool(model: Model, facts: ArtifactFacts | None, inputs: PlacementInputs) -> PoolOnEngine:
    declared, config = inputs.declared, inputs.config
    pool = declared.pool_of(model)
    if pool is None:
        return PoolOnEngine()
    name = f"LoRAPool {pool.metadata.namespace}/{pool.metadata.name}"
    if (problem := pool_problem(pool, model, facts, config)) is not None:
        return PoolOnEngine(name, None, problem.message, f"{name} is left out: {problem.message}")
    used = applied(pool, model, facts, config)
    if used is None:
        why = "what its adapters need is not known without the facts of the weights"
        return PoolOnEngine(name, note=f"{name} is left out: {why}")
    spec, others = pool.spec, [p for p in declared.pools if p.model_key == model.key and p is not pool]
    lost = "".join(
        f"; LoRAPool {p.metadata.namespace}/{p.metadata.name} comes too late: one pool per Model" for p in others
    )
    note = (
        f"{name}: {spec.slots_per_replica} places for adapters of rank {spec.max_rank} on each replica, {spec.cached} "
        f"in its host memory; adapters in these files: {declared.adapters_of(pool)}{lost}"
    )
    return PoolOnEngine(name, used, note=note)


def _tune(model: Model, facts: ArtifactFacts | None, config: OperatorConfig, pool: LoRAPool | None) -> Tune:
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
