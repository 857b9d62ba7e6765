"""What placing adapters reads and says. Times are seconds of one monotonic clock; None is "unknown", never zero.

A replica is named by the uid of its pod, an adapter by the uid of its LoRAAdapter, a revision by its engine name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from shoal.api.demand import AdapterDemand

Residency = Literal["OnDemand", "Warm", "Pinned"]
Why = Literal["pinned", "warm", "next", "traffic"]
"""Why an adapter is on a floor: its residency, to take over from the revision that answers, or its requests."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one engine takes, as its pod was started."""

    slots: int
    """Adapters in its GPU memory; the base model counts as one."""
    cached: int
    """Adapters in its host memory."""

    @property
    def pinned(self) -> int:
        """Adapters that it lets be pinned: SGLang keeps one slot for everybody else."""
        return self.slots - 1


@dataclass(frozen=True, slots=True)
class Replica:
    """An engine pod of the pool's Model that is not gone."""

    uid: str
    pod: str
    """`namespace/name`, for sentences."""
    ready: bool
    """Ready, and its stream is live."""
    draining: bool
    """It drains, or its pod is being deleted, or its node is lost: it gets nothing new."""
    resident: frozenset[str] | None
    """Engine names that this boot of its engine has `loaded`; None: not known."""
    limits: Limits | None = None
    """Where they differ from the pool's: a replica of before a resize."""


@dataclass(frozen=True, slots=True)
class Revision:
    """One revision of an adapter."""

    name: str
    """What engines call it (`api.loraadapter.engine_name`)."""
    rank: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRAAdapter of the pool that was read and fits; those that do not are not here."""

    uid: str
    key: str
    """`namespace/name`."""
    current: Revision | None
    """The revision that answers; None: none does yet, `next` will be the first."""
    next: Revision | None = None
    """A newer one, to be loaded beside it."""
    residency: Residency = "OnDemand"
    min_copies: int = 1
    """With Warm and Pinned."""

    @property
    def revisions(self) -> tuple[Revision, ...]:
        """Those that belong on floors; the one that answers first."""
        if self.current is None:
            return () if self.next is None else (self.next,)
        return (self.current,) if self.next is None else (self.current, self.next)


@dataclass(frozen=True, slots=True)
class AdapterSignalSource:
    """A gateway that was Ready once and is not gone."""

    name: str
    boot: str | None
    demand: Mapping[str, AdapterDemand] | None
    """By uid of the adapter. None: its stream is not live. A live one has nothing of what it does not name."""


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """One pool at one moment."""

    limits: Limits
    replicas: tuple[Replica, ...]
    adapters: Mapping[str, Adapter]
    """By uid."""
    sources: tuple[AdapterSignalSource, ...] | None
    """None: not even the gateways are known yet."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What was learned of one adapter's requests, old ones fading. Kept only while there is something to remember."""

    at: float
    """When something was last seen to change."""
    load: float = 0.0
    """Requests in flight or held, smoothed over `traffic.LOAD_SECONDS`; as all figures here, of the moment `at`."""
    lasting: float = 0.0
    """The same over `traffic.LASTING_SECONDS`."""
    uses: float = 0.0
    """Requests, each counting half after `traffic.HALF_LIFE`."""
    used: float = 0.0
    """When it was last seen to be asked for."""
    now: int = 0
    """In flight or held since then."""


@dataclass(frozen=True, slots=True)
class GatewayTraffic:
    """What a gateway said when it was last heard."""

    boot: str | None
    arrivals: Mapping[str, int]
    """By adapter, monotonic per boot."""
    busy: Mapping[str, int]
    """In flight or held, by adapter that has any."""


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """What placing remembers of one pool in this term; opaque to others. The next plan gets it back."""

    now: float
    """Of the last plan."""
    began: float
    """Of the first plan of this term."""
    homes: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """By adapter: the replicas on whose floors it is, those that should stay first."""
    copies: Mapping[str, int] = field(default_factory=dict[str, int])
    """By adapter that has a home: copies wanted; while one moves it has a home more."""
    traffic: Mapping[str, Traffic] = field(default_factory=dict[str, Traffic])
    """By adapter; those that were asked for lately."""
    reports: Mapping[str, GatewayTraffic] = field(default_factory=dict[str, GatewayTraffic])
    """By gateway."""
    budget: float = 0.0
    """Moves that may be made now."""
    away: Mapping[str, float] = field(default_factory=dict[str, float])
    """By replica: since when it is not ready."""
    switching: frozenset[str] = frozenset()
    """Adapters that had a newer revision beside them."""
    fewer: Mapping[str, float] = field(default_factory=dict[str, float])
    """By adapter: since when fewer copies would do."""


@dataclass(frozen=True, slots=True)
class PlannedAdapter:
    """One revision on a floor."""

    adapter: str
    """Uid of the LoRAAdapter."""
    name: str
    """Engine name of the revision."""
    pinned: bool
    why: Why


@dataclass(frozen=True, slots=True)
class AdapterPlacement:
    """What the plan says of one adapter that is on a floor or should be."""

    wanted: int
    """Copies."""
    homes: tuple[str, ...]
    """Replicas on whose floors it is."""
    reason: str | None = None
    """A reason of `reasons.py` where not all copies have a place."""
    message: str = ""


@dataclass(frozen=True, slots=True)
class Move:
    """A change of an adapter's homes in this step."""

    adapter: str
    source: str | None
    """Replica from whose floor it went; None: a further copy."""
    target: str | None
    """Replica on whose floor it came; None: a copy less."""
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What each replica should hold. Beyond it adapters are loaded when they are asked for."""

    desired: Mapping[str, tuple[PlannedAdapter, ...]]
    """By replica, each that there is: what to load first, first. Never more than it may hold."""
    adapters: Mapping[str, AdapterPlacement]
    """By adapter; one that is absent is on no floor and needs none: its first request loads it."""
    moves: tuple[Move, ...] = ()
    replan_after: float | None = None
    """Seconds after which the same input may give another plan; None: only with another input."""
    stale: tuple[str, ...] = ()
    """Gateways that are not heard, by name: no copy goes for want of requests meanwhile."""


@dataclass(frozen=True, slots=True)
class Switch:
    """Whether gateways may be sent to the `next` revision of an adapter."""

    now: bool
    missing: tuple[str, ...] = ()
    """Replicas that have yet to load it, by uid."""
