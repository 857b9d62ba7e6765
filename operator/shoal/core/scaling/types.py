"""What the decider reads and says. Times are seconds of one monotonic clock; None is "unknown", never zero."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Policy:
    """What the Model's spec asks for."""

    minimum: int = 0
    maximum: int = 10
    kv_percent: int = 80
    queued_per_replica: int = 4
    idle_seconds: float = 600.0
    stabilization_seconds: float = 120.0
    max_step: int = 8
    """Replicas that one decision adds at most, or as many as there are, where that is more."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a replica's agent says, as far as decisions read it."""

    engine_boot: str | None = None
    running: int | None = None
    waiting: int | None = None
    waiting_tokens: int | None = None
    kv_tokens_used: int | None = None
    kv_tokens_total: int | None = None
    prompt_tokens_total: int | None = None
    generation_tokens_total: int | None = None


@dataclass(frozen=True, slots=True)
class Replica:
    """An engine pod that is not gone."""

    uid: str
    pod: str
    gpu_class: str
    ready: bool
    was_ready: bool
    """Ready once: only then is it a voice."""
    deleting: bool
    lost: bool
    """On a node that has been unreachable beyond its toleration: dead, so not a voice."""
    created: float
    load: Load | None
    """None: its stream is not live."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What one gateway has of the Model."""

    arrivals: int
    in_flight: int
    held: int
    held_tokens: int
    oldest_seconds: float


@dataclass(frozen=True, slots=True)
class Voice:
    """A gateway that was Ready once and is not gone."""

    name: str
    boot: str | None
    demand: Demand | None
    """None: its stream is not live. A live one that has nothing of the Model says zeros."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A GPU class that the Model may use, in the order in which they are filled (cheapest first)."""

    gpu_class: str
    replicas: int
    """Asked for now."""
    room: int | None
    """Further replicas for which there are free GPUs; None: not known."""
    maximum: int | None = None
    kv_tokens: int | None = None
    """Of one replica: the engine's own figure, else the predicted one."""
    cold_start_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One Model at one moment."""

    policy: Policy
    wanted: int
    """Replicas wanted so far: of the last decision, or after a restart of the operator those that the Deployments ask
    for."""
    replicas: tuple[Replica, ...]
    voices: tuple[Voice, ...] | None
    """None: not even the gateways are known yet."""
    variants: tuple[Variant, ...]
    rolling: bool
    """A rollout is under way."""
    term_began: float
    """When this leader's term began."""
    new: bool = False
    """The Model has never had a replica."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What the decider remembers of one Model in this term; opaque to others. The next decision gets it back."""

    began: float
    state: Mapping[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True, slots=True)
class Rule:
    """What one rule asks for."""

    name: str
    replicas: int | None
    """None: an input is unknown."""
    inputs: Mapping[str, float | int | str | None]
    sentence: str


@dataclass(frozen=True, slots=True)
class Decision:
    """How many, and why."""

    wanted: int
    before: int
    reason: str
    """A reason of `reasons.py`."""
    message: str
    rules: tuple[Rule, ...] = ()
    """The deciding one first."""
    alternative: str = ""
    """What was not done, and why not."""
    look_again: float | None = None
    """Seconds after which the same input may give another decision; None: only with another input."""
