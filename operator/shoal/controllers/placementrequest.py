"""What a Model asks of the plan, and what the plan decides for it."""

from dataclasses import dataclass
from typing import Literal

from shoal.api.artifact import ArtifactFacts
from shoal.api.lorapool import LoRAPool
from shoal.api.model import Model
from shoal.core.candidates import Considered
from shoal.core.enginerevision import EngineRevision, engine_revision
from shoal.core.lora.pool import same_engines
from shoal.core.placement import Placement

Role = Literal["placed", "frozen"]
"""Whether a Model is to be placed, or keeps what it has: it is paused, not accepted, or its facts are not known."""


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """A Model as the planner counts with it."""

    model: Model
    facts: ArtifactFacts | None
    role: Role
    pool: LoRAPool | None = None
    """Whose adapters its engines serve."""

    def same(self, other: "PlacementRequest | None") -> bool:
        return (
            other is not None
            and self.role == other.role
            and (self.facts is other.facts or self.facts == other.facts)
            and self.model.metadata.uid == other.model.metadata.uid
            and (self.model is other.model or self.model.spec == other.model.spec)
            and same_engines(self.pool, other.pool)
        )

    def engine_revision(self, gpu_class: str) -> EngineRevision:
        """What engines on a class run for this request."""
        return engine_revision(self.model.spec, gpu_class, self.facts, self.pool)


@dataclass(frozen=True, slots=True)
class PlacementDecision:
    """What was decided for one Model."""

    placement: Placement
    considered: Considered
    wanted: int = 1
    """Replicas, as the scaler said."""
    untried: frozenset[str] = frozenset()
    """Classes that fit and on which the Model was not in backoff when this was decided."""
    lacks_surge: frozenset[str] = frozenset()
    """Classes of which this decision knew that a rollout waits there for a GPU."""
