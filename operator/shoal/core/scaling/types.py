"""Input and output of the scaling decision. Times are seconds of one monotonic clock; None is "unknown", never zero."""

from collections.abc import Mapping
from dataclasses import dataclass, field

_ENOUGH_REQUESTS = 10.0
"""Fewer requests give no meaningful mean cost."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Scaling parameters from the Model's spec."""

    minimum: int = 0
    maximum: int = 10
    kv_percent: int = 80
    queued_per_replica: int = 4
    idle_seconds: float = 600.0
    stabilization_seconds: float = 120.0
    max_step: int = 8
    """Replicas that one decision adds at most; or as many as there are, where that is more."""
    rate_percent: int = 80
    """Share of a replica's learned rate that arriving work may take."""


@dataclass(frozen=True, slots=True)
class Load:
    """The part of a replica agent's report that decisions read."""

    engine_boot: str | None = None
    phase: str | None = None
    """As in `api/replica.py`. An engine that fetches or loads runs nothing; otherwise missing values are unknown."""
    running: int | None = None
    max_running: int | None = None
    waiting: int | None = None
    waiting_tokens: int | None = None
    kv_tokens_used: int | None = None
    kv_tokens_total: int | None = None
    prompt_tokens_total: int | None = None
    generation_tokens_total: int | None = None
    adapter_slots: int | None = None
    """Distinct adapters that requests may use at once; None: the replica serves none."""
    tokens_per_step: float | None = None
    """As in `api/replica.py`. No decision reads it."""


@dataclass(frozen=True, slots=True)
class Replica:
    """An engine pod that exists."""

    uid: str
    pod: str
    gpu_class: str
    ready: bool
    was_ready: bool
    """It was ready at least once; only then are its signals required for a step down."""
    deleting: bool
    lost: bool
    """Its node has been unreachable beyond the toleration: the replica is dead, and its signals are not required."""
    created: float
    load: Load | None
    """None: the agent's stream is not live."""


@dataclass(frozen=True, slots=True)
class Demand:
    """One gateway's report on the Model."""

    arrivals: int
    in_flight: int
    held: int
    held_tokens: int
    oldest_seconds: float
    adapters: frozenset[str] | None = None
    """Uids of adapters in flight or held; None: the gateway does not report them."""
    complete: bool = True
    """False: the gateway left values out, which are zero here. The report may raise the need, never lower it."""


@dataclass(frozen=True, slots=True)
class SignalSource:
    """A gateway that was Ready once and still exists."""

    name: str
    boot: str | None
    demand: Demand | None
    """None: the gateway's stream is not live. A live gateway without requests of the Model reports zeros."""


@dataclass(frozen=True, slots=True)
class ScalingVariant:
    """A GPU class that the Model may use. Variants are in the order in which they are filled (cheapest first)."""

    gpu_class: str
    replicas: int
    """Requested now."""
    headroom: int | None
    """Further replicas for which there are free GPUs; None: unknown."""
    maximum: int | None = None
    kv_tokens: int | None = None
    """Of one replica: reported by the engine, else predicted."""
    cold_start_seconds: float | None = None
    work_rate: float | None = None
    """Work per second (`learn.work`) of one replica while requests waited, from earlier terms; None: unknown."""
    least_work_rate: float | None = None
    """Work per second that one replica does at least (`estimate.py`); None: unknown."""


@dataclass(frozen=True, slots=True)
class ModelSnapshot:
    """One Model at one moment."""

    policy: Policy
    wanted: int
    """Replicas wanted by the last decision; after a restart of the operator, those that the Deployments ask for."""
    replicas: tuple[Replica, ...]
    sources: tuple[SignalSource, ...] | None
    """None: the gateways are not known yet."""
    variants: tuple[ScalingVariant, ...]
    rolling: bool
    """A rollout is under way."""
    term_began: float
    """When this leader's term began."""
    new: bool = False
    """The Model has never had a replica."""
    last_wake: float | None = None
    """When the Model was last woken by hand: counts as a request at that time."""


@dataclass(frozen=True, slots=True)
class SourceMark:
    """Counters of a gateway's last report."""

    boot: str | None
    arrivals: int
    busy: bool
    """It had requests in flight or held."""
    live: bool
    """Its stream was live at the last decision."""
    at: float | None
    """Time of that report; None: there was none in this term."""


@dataclass(frozen=True, slots=True)
class WorkMeter:
    """A replica's work since a mark, while its engine runs on and either always or never has a queue."""

    engine_boot: str | None
    work: float
    """At the last decision, in units of `learn.work`."""
    marked: float
    """Time of the mark."""
    work_then: float
    queued: bool


@dataclass(frozen=True, slots=True)
class Speed:
    """Work per second of one replica of a class."""

    learned: float | None = None
    """While requests waited: the replica's limit."""
    proven: float = 0.0
    """The most it did without a queue: the limit is not below."""


@dataclass(frozen=True, slots=True)
class ScalingMemory:
    """Opaque memory of one Model's decisions in this term, passed from each decision to the next."""

    began: float
    now: float
    """Time of the last decision."""
    due: float | None
    """When the last decision asked for the next one."""
    window: tuple[tuple[float, int], ...]
    """(until, replicas): how many were enough, and until when; later entries are lower."""
    quiet_since: float
    """Since when nothing arrived, ran or was held."""
    woken: float
    """When replicas were first wanted after zero."""
    served: bool = False
    """A replica has been ready since `woken`."""
    settled: float = 0.0
    """Until when the first replica takes in held requests, and its queue means nothing."""
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
    """When the last step down was decided."""
    fresh_since: float = 0.0
    """Since when all signals are fresh and no rollout is under way."""
    stabilization_factor: float = 1.0
    """Multiple of `stabilization_seconds` for which fewer must have been enough."""
    progress: float | None = None
    """Requests done so far, those in progress as halves; None: a gateway is stale."""
    done: float = 0.0
    """Requests done, faded over time."""
    worked: float = 0.0
    """Work done for them, faded alike."""

    @property
    def work_per_request(self) -> float | None:
        return self.worked / self.done if self.done >= _ENOUGH_REQUESTS and self.worked > 0 else None


@dataclass(frozen=True, slots=True)
class ScalingRule:
    """The result of one rule, for display."""

    name: str
    replicas: int | None
    """None: an input is unknown."""
    inputs: Mapping[str, float | int | str | None]
    sentence: str


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """How many replicas are wanted, and why."""

    wanted: int
    before: int
    reason: str
    """One of `reasons.py`."""
    message: str
    rules: tuple[ScalingRule, ...] = ()
    """The deciding one first."""
    alternative: str = ""
    """What was not decided, and why not."""
    recheck_seconds: float | None = None
    """Seconds after which the same input may give another decision; None: never. If the next decision is much later
    than this (`learn.LATE_SECONDS`), windows begin anew."""
    stale: tuple[str, ...] = ()
    """Names of signal sources that are not fresh."""
    invalid: tuple[str, ...] = ()
    """Reported values that are impossible, with their source."""
