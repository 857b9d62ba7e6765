"""What the decider reads and says. Times are seconds of one monotonic clock; None is "unknown", never zero."""

from collections.abc import Mapping
from dataclasses import dataclass, field

_ENOUGH_REQUESTS = 10.0
"""Fewer say nothing about the mean."""


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
    rate_percent: int = 80
    """Share of a replica's learned rate that arrivals may take."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a replica's agent says, as far as decisions read it."""

    engine_boot: str | None = None
    phase: str | None = None
    """As in `api/replica.py`. An engine that fetches or loads runs nothing; otherwise figures that miss are unknown."""
    running: int | None = None
    max_running: int | None = None
    waiting: int | None = None
    waiting_tokens: int | None = None
    kv_tokens_used: int | None = None
    kv_tokens_total: int | None = None
    prompt_tokens_total: int | None = None
    generation_tokens_total: int | None = None
    adapter_slots: int | None = None
    """Distinct adapters that requests may use at once; None: it serves none."""


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
    adapters: frozenset[str] | None = None
    """Adapters in flight or held, by uid; None: it does not tell."""
    complete: bool = True
    """False: it left something out, which stands as zero here. What it says counts up, and never down."""


@dataclass(frozen=True, slots=True)
class SignalSource:
    """A gateway that was Ready once and is not gone."""

    name: str
    boot: str | None
    demand: Demand | None
    """None: its stream is not live. A live one that has nothing of the Model says zeros."""


@dataclass(frozen=True, slots=True)
class ScalingVariant:
    """A GPU class that the Model may use, in the order in which they are filled (cheapest first)."""

    gpu_class: str
    replicas: int
    """Asked for now."""
    headroom: int | None
    """Further replicas for which there are free GPUs; None: not known."""
    maximum: int | None = None
    kv_tokens: int | None = None
    """Of one replica: the engine's own figure, else the predicted one."""
    cold_start_seconds: float | None = None
    work_rate: float | None = None
    """Work per second (`learn.work`) of one replica while requests waited, before this term; None: not known."""
    least_work_rate: float | None = None
    """What one replica does per second at least, see `estimate.py`; None: not known."""


@dataclass(frozen=True, slots=True)
class ModelSnapshot:
    """One Model at one moment."""

    policy: Policy
    wanted: int
    """Replicas wanted so far: of the last decision, or after a restart of the operator those that the Deployments ask
    for."""
    replicas: tuple[Replica, ...]
    sources: tuple[SignalSource, ...] | None
    """None: not even the gateways are known yet."""
    variants: tuple[ScalingVariant, ...]
    rolling: bool
    """A rollout is under way."""
    term_began: float
    """When this leader's term began."""
    new: bool = False
    """The Model has never had a replica."""
    last_wake: float | None = None
    """When somebody last woke the Model by hand: counts as a request at that time."""


@dataclass(frozen=True, slots=True)
class SourceMark:
    """A gateway's counters when it was last heard."""

    boot: str | None
    arrivals: int
    busy: bool
    """It had something in flight or held."""
    live: bool
    """At the last decision."""


@dataclass(frozen=True, slots=True)
class WorkMeter:
    """A replica's work since a mark, while its engine goes on and either always or never has a queue."""

    engine_boot: str | None
    work: float
    """At the last decision, see `learn.work`."""
    marked: float
    """Time of the mark."""
    work_then: float
    queued: bool


@dataclass(frozen=True, slots=True)
class Speed:
    """Work per second of one replica of a class."""

    learned: float | None = None
    """What it did while requests waited: its limit."""
    proven: float = 0.0
    """The most it did without a queue: its limit is not below."""


@dataclass(frozen=True, slots=True)
class ScalingMemory:
    """What the decider remembers of one Model in this term; opaque to others. The next decision gets it back."""

    began: float
    now: float
    """Of the last decision."""
    due: float | None
    """When that decision asked to be looked at again."""
    window: tuple[tuple[float, int], ...]
    """(until, replicas): how many were enough, and until when that was said; later entries are lower."""
    quiet_since: float
    """Since when nothing arrived, ran or was held."""
    woken: float
    """When replicas were first wanted, after there were none."""
    served: bool = False
    """One of them has been ready since."""
    settled: float = 0.0
    """Until when the first one takes in what was held: no queue that means anything."""
    last_request: float | None = None
    """When a request was last seen to arrive; None: not in this term."""
    source_marks: Mapping[str, SourceMark] = field(default_factory=dict[str, SourceMark])
    meters: Mapping[str, WorkMeter] = field(default_factory=dict[str, WorkMeter])
    """By uid of the replica."""
    speeds: Mapping[str, Speed] = field(default_factory=dict[str, Speed])
    """By GPU class."""
    arrival_rate: float | None = None
    """Requests per second, smoothed over `learn.ARRIVALS_SECONDS`."""
    arrival_rate_now: float | None = None
    """The same over `learn.ARRIVALS_NOW_SECONDS`."""
    queue_since: float | None = None
    """Since when more requests wait than the target allows; None: they do not."""
    lowered: float | None = None
    """When fewer were decided last."""
    fresh_since: float = 0.0
    """Since when every voice is heard and no rollout is under way."""
    stabilization_factor: float = 1.0
    """How many times `stabilization_seconds` fewer must have been enough."""
    progress: float | None = None
    """Requests done so far, those in work as halves; None: not every gateway is heard."""
    done: float = 0.0
    """Requests done, old ones fading."""
    worked: float = 0.0
    """Work done for them, fading alike."""

    @property
    def work_per_request(self) -> float | None:
        return self.worked / self.done if self.done >= _ENOUGH_REQUESTS and self.worked > 0 else None


@dataclass(frozen=True, slots=True)
class ScalingRule:
    """What one rule asks for."""

    name: str
    replicas: int | None
    """None: an input is unknown."""
    inputs: Mapping[str, float | int | str | None]
    sentence: str


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """How many, and why."""

    wanted: int
    before: int
    reason: str
    """A reason of `reasons.py`."""
    message: str
    rules: tuple[ScalingRule, ...] = ()
    """The deciding one first."""
    alternative: str = ""
    """What was not done, and why not."""
    recheck_seconds: float | None = None
    """Seconds after which the same input may give another decision; None: only with another input. Who looks much
    later than asked (`learn.LATE_SECONDS`) makes the windows begin anew."""
    stale: tuple[str, ...] = ()
    """Voices that are not fresh, by name."""
    invalid: tuple[str, ...] = ()
    """What was said and cannot be, with who said it."""
