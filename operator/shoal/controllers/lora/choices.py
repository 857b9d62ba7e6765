"""A pool and its Model, and what both ask of adapters: looked up for every adapter, computed when they change."""

from dataclasses import dataclass

from shoal.api import reasons
from shoal.api.adapters import AdapterSettings
from shoal.api.lorapool import LoRAPool
from shoal.api.model import Model
from shoal.controllers.world import World
from shoal.core import artifacts
from shoal.core.lora import pool as pools
from shoal.core.lora.format.check import BaseModelFacts, Limits, of_settings
from shoal.core.lora.lifecycle.revisions import demands
from shoal.core.status.observed import ModelProblem
from shoal.core.status.poolstatus import claimed
from shoal.engine.kinds import kind_of
from shoal.manifests.pool import pool_problem


@dataclass(frozen=True, slots=True)
class Chosen:
    """A pool as its adapters see it."""

    pool: LoRAPool
    model: Model | None
    problem: ModelProblem | None
    """Why it is not accepted."""
    settings: AdapterSettings | None = None
    """The settings that its agents get; None while the pool is not accepted, or its base was not read yet."""
    demands: str = ""
    """With settings: what they ask of each adapter."""

    @property
    def limits(self) -> tuple[Limits, BaseModelFacts] | None:
        """What adapters are checked against."""
        if self.settings is None or self.model is None:
            return None
        return of_settings(self.settings, kind_of(self.model).pod.adapter_rules)

    def same_for_adapters(self, other: "Chosen | None") -> bool:
        """Whether no adapter has to be looked at again."""
        return (
            other is not None
            and self.problem == other.problem
            and self.demands == other.demands
            and self.pool.spec.allowed_namespaces == other.pool.spec.allowed_namespaces
            and self.pool.spec.base_names == other.pool.spec.base_names
            and self.pool.metadata.uid == other.pool.metadata.uid
        )


class Choices:
    """`of` the key of a pool."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._known: dict[str, tuple[LoRAPool, Model | None, LoRAPool | None, Chosen]] = {}

    def of(self, pool_key: str) -> Chosen | None:
        """None: there is no such pool, or it goes."""
        world = self._world
        custom = world.pools.get(pool_key)
        if custom is None or custom.object is None or custom.metadata.deletion_timestamp is not None:
            self._known.pop(pool_key, None)
            return None
        pool = custom.object
        named = world.models.get(pool.model_key)
        gone = named is None or named.metadata.deletion_timestamp is not None
        model = None if named is None or gone else named.object
        holder = world.pool_of(pool.model_key)
        known = self._known.get(pool_key)
        if known is not None and known[0] is pool and known[1] is model and known[2] is holder:
            return known[3]
        chosen = self._compute(pool, model, holder)
        self._known[pool_key] = (pool, model, holder, chosen)
        return chosen

    def _compute(self, pool: LoRAPool, model: Model | None, holder: LoRAPool | None) -> Chosen:
        if model is None:
            why = f"spec.modelRef: there is no Model {pool.model_key}; create it, or name another one"
            return Chosen(pool, None, ModelProblem(reasons.MODEL_NOT_FOUND, why))
        if (taken := claimed(pool, holder)) is not None:
            return Chosen(pool, model, taken)
        facts = artifacts.known(model)
        problem = pool_problem(pool, model, facts, self._world.config)
        if problem is not None or facts is None or not pools.usable(facts):
            return Chosen(pool, model, problem)
        settings = pools.settings(pool, facts)
        # Another engine asks for something else of the same adapters.
        asks = f"{demands(settings)} {kind_of(model).pod.adapter_rules.engine}"
        return Chosen(pool, model, None, settings, asks)
