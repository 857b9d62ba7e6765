"""The observations of a Model that its status is computed from."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.api.model import CanaryAnswers, ColdStartStatus, Model, PrefetchStatus
from shoal.core.artifacts import SourceReading
from shoal.core.enginedifferences import NONE, EngineDifferences
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
    """The names that a Model or an adapter claims."""

    owned: tuple[str, ...]
    """Short names that it owns."""
    lost: tuple[tuple[str, str], ...]
    """(name, kind and key of the older object that owns it)."""


@dataclass(frozen=True, slots=True)
class Observed:
    """The observations that the status is computed from."""

    model: Model
    problems: tuple[ModelProblem, ...]
    served: ServedNames
    placement: Placement | None
    """None: not decided yet."""
    deployments: tuple[Deployment, ...]
    pods: tuple[Pod, ...]
    """The Model's engine pods."""
    reading: SourceReading | None = None
    """The state of the source; None while the Model is not accepted."""
    sized: Mapping[str, Sized] = field(default_factory=dict[str, Sized])
    """Class -> size of a replica."""
    tokens: Mapping[str, int] = field(default_factory=dict[str, int])
    """Class -> KV tokens of one replica, as reported by its engine."""
    cold_starts: Mapping[str, int] = field(default_factory=dict[str, int])
    """Class -> seconds from creation to Ready of the last replica."""
    node_waits: Mapping[str, int] = field(default_factory=dict[str, int])
    """Class -> seconds that the next replica may take longer, because it waits for a node that has to be added."""
    outages: frozenset[str] = frozenset()
    """Classes of which no further node is expected."""
    start_stages: Mapping[str, ColdStartStatus] = field(default_factory=dict[str, ColdStartStatus])
    """Class -> stages of the last cold starts."""
    canaries: Mapping[str, CanaryAnswers] = field(default_factory=dict[str, CanaryAnswers])
    """Class -> what replicas there answer to the canary."""
    wanted: int | None = None
    """Replicas decided on; None: not decided yet."""
    untried: frozenset[str] = frozenset()
    """Classes that fit and on which the Model was not in backoff when `placement` was decided."""
    differences: EngineDifferences = NONE
    """Where its type of engine does less than others."""
    scaling: ScalingDecision | None = None
    """Why so many replicas are wanted, while not all serve yet; at zero, why zero."""
    stale_signals: str | None = None
    """Message about signal sources that have been stale for a while, and what they hold up."""
    driven: ConditionUpdate | None = None
    """The condition of a Model whose replicas KEDA sets."""
    prefetch: tuple[PrefetchStatus, ...] = ()
    """Weights in node caches, per class."""
    failure: ModelProblem | None = None
    """What failed when the plan was applied."""
    paused: bool = False
    scaled_by: str = ""
    """Foreign autoscalers that set the replicas of a paused Model; "" if there are none."""
