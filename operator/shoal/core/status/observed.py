"""What was observed of a Model: all that its status is computed from."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.api.model import Model
from shoal.core.artifacts import SourceReading
from shoal.core.facts import Deployment, Pod
from shoal.core.placement import Placement
from shoal.core.scaling import ScalingDecision
from shoal.core.sizing import Sized
from shoal.core.status.conditions import ConditionUpdate


@dataclass(frozen=True, slots=True)
class ModelProblem:
    """Why a Model is not accepted."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class ServedNames:
    """The names that a Model or an adapter asked for."""

    owned: tuple[str, ...]
    """Short ones."""
    lost: tuple[tuple[str, str], ...]
    """(name, kind and key of the older object that has it)."""


@dataclass(frozen=True, slots=True)
class Observed:
    """All that the status is computed from."""

    model: Model
    problems: tuple[ModelProblem, ...]
    served: ServedNames
    placement: Placement | None
    """None while nothing is decided."""
    deployments: tuple[Deployment, ...]
    pods: tuple[Pod, ...]
    """The Model's own engine pods."""
    reading: SourceReading | None = None
    """What is known of the source; None while the Model is not accepted."""
    sized: Mapping[str, Sized] = field(default_factory=dict[str, Sized])
    """class -> the sums of a replica."""
    tokens: Mapping[str, int] = field(default_factory=dict[str, int])
    """class -> KV tokens of one replica, as its engine says."""
    cold_starts: Mapping[str, int] = field(default_factory=dict[str, int])
    """class -> seconds that the last replica took from its creation to Ready."""
    wanted: int | None = None
    """Replicas that were decided on; None while nothing is."""
    untried: frozenset[str] = frozenset()
    """Classes that fit and on which the Model had no setback when `placement` was decided."""
    scaling: ScalingDecision | None = None
    """Why there are so many, while that number does not serve yet; at zero, why it is zero."""
    stale_signals: str | None = None
    """Who is not heard for long enough to be worth a word, and what that holds up."""
    driven: ConditionUpdate | None = None
    """The condition of a Model whose replicas KEDA writes."""
    failure: ModelProblem | None = None
    """What went wrong when the plan was applied."""
    paused: bool = False
    scaled_by: str = ""
    """Autoscalers of somebody else's that write the replicas of a Model that is paused; empty: none does."""
