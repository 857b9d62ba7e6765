"""Input and output of adapter placement. Times are seconds of one monotonic clock; None is "unknown", never zero.

A replica is identified by the uid of its pod, an adapter by the uid of its LoRAAdapter, a revision by its engine name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from shoal.api.demand import AdapterDemand

Residency = Literal["OnDemand", "Warm", "Pinned"]
Why = Literal["pinned", "warm", "next", "traffic"]
"""Why a replica should hold an adapter: its residency, a next revision, or requests."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Capacity of one engine for adapters, as set at its start."""

    slots: int
    """Adapters in GPU memory; the base model counts as one."""
    cached: int
    """Adapters in host memory."""

    @property
    def pinned(self) -> int:
        """Adapters that may be pinned: SGLang keeps one slot for the others."""
        return self.slots - 1


@dataclass(frozen=True, slots=True)
class Replica:
    """An existing engine pod of the pool's Model."""

    uid: str
    pod: str
    """`namespace/name`, for messages."""
    ready: bool
    """Ready, and its stream is live."""
    draining: bool
    """It drains, its pod is being deleted, or its node is lost: it gets no new adapters."""
    resident: frozenset[str] | None
    """Engine names that this boot of the engine has `loaded`; None: unknown."""
    limits: Limits | None = None
    """Set if they differ from the pool's: the replica is from before a resize."""


@dataclass(frozen=True, slots=True)
class Revision:
    """One revision of an adapter."""

    name: str
    """Its name in engines (`api.loraadapter.engine_name`)."""
    rank: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRAAdapter of the pool that was read and fits."""

    uid: str
    key: str
    """`namespace/name`."""
    current: Revision | None
    """The revision that is served; None: none yet, `next` will be the first."""
    next: Revision | None = None
    """A newer revision, to be loaded beside `current`."""
    residency: Residency = "OnDemand"
    min_copies: int = 1
    """For Warm and Pinned."""

    @property
    def revisions(self) -> tuple[Revision, ...]:
        """Revisions to plan; the current one first."""
        if self.current is None:
            return () if self.next is None else (self.next,)
        return (self.current,) if self.next is None else (self.current, self.next)


@dataclass(frozen=True, slots=True)
class AdapterSignalSource:
    """A gateway that was Ready once and still exists."""

    name: str
    boot: str | None
    demand: Mapping[str, AdapterDemand] | None
    """By uid of the adapter; adapters that are absent have no requests. None: the gateway's stream is not live."""


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """One pool at one moment."""

    limits: Limits
    replicas: tuple[Replica, ...]
    adapters: Mapping[str, Adapter]
    """By uid."""
    sources: tuple[AdapterSignalSource, ...] | None
    """None: the gateways are not known yet."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What was learned of one adapter's requests, fading over time. Kept only while there is something to remember."""

    at: float
    """Time of the last change."""
    load: float = 0.0
    """Requests in flight or held, smoothed over `traffic.LOAD_SECONDS`; like all values here, at the time `at`."""
    lasting: float = 0.0
    """The same, smoothed over `traffic.LASTING_SECONDS`."""
    uses: float = 0.0
    """Requests, each counting half after `traffic.HALF_LIFE`."""
    used: float = 0.0
    """When it last had a request."""
    now: int = 0
    """Requests in flight or held since `at`."""


@dataclass(frozen=True, slots=True)
class GatewayTraffic:
    """A gateway's last report."""

    boot: str | None
    arrivals: Mapping[str, int]
    """By adapter, monotonic per boot of the gateway."""
    busy: Mapping[str, int]
    """Requests in flight or held, by adapter that has any."""


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """Opaque memory of one pool's plans in this term, passed from each plan to the next."""

    now: float
    """Time of the last plan."""
    began: float
    """Time of the first plan of this term."""
    homes: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """By adapter: the replicas that should hold it; those that should stay come first."""
    copies: Mapping[str, int] = field(default_factory=dict[str, int])
    """By adapter with a home: copies wanted; while a copy moves there is one home more."""
    traffic: Mapping[str, Traffic] = field(default_factory=dict[str, Traffic])
    """By adapter with recent requests."""
    reports: Mapping[str, GatewayTraffic] = field(default_factory=dict[str, GatewayTraffic])
    """By gateway."""
    budget: float = 0.0
    """Loads for traffic and balance that are allowed now."""
    away: Mapping[str, float] = field(default_factory=dict[str, float])
    """By replica: since when it is not ready."""
    switching: frozenset[str] = frozenset()
    """Adapters that had a next revision."""
    fewer: Mapping[str, float] = field(default_factory=dict[str, float])
    """By adapter: since when fewer copies would be enough."""


@dataclass(frozen=True, slots=True)
class PlannedAdapter:
    """A revision that one replica should hold."""

    adapter: str
    """Uid of the LoRAAdapter."""
    name: str
    """Engine name of the revision."""
    pinned: bool
    why: Why


@dataclass(frozen=True, slots=True)
class AdapterPlacement:
    """The plan for one adapter that replicas hold or should hold."""

    wanted: int
    """Copies."""
    homes: tuple[str, ...]
    """Replicas that should hold it."""
    reason: str | None = None
    """One of `reasons.py`, where not all copies have a place; else None."""
    message: str = ""


@dataclass(frozen=True, slots=True)
class Move:
    """A change of an adapter's homes in one plan."""

    adapter: str
    source: str | None
    """The replica that no longer holds it; None: a further copy."""
    target: str | None
    """The replica that holds it now; None: one copy less."""
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The adapters that each replica should hold. Other adapters are loaded by their first request."""

    desired: Mapping[str, tuple[PlannedAdapter, ...]]
    """By replica, for all replicas; in order of loading, never more than fit."""
    adapters: Mapping[str, AdapterPlacement]
    """By adapter; adapters that are absent are in no plan and need none."""
    moves: tuple[Move, ...] = ()
    replan_after: float | None = None
    """Seconds after which the same input may give another plan; None: never."""
    stale: tuple[str, ...] = ()
    """Names of stale gateways; while there are any, no copy goes for lack of requests."""


@dataclass(frozen=True, slots=True)
class Switch:
    """Whether gateways may be sent to the `next` revision of an adapter."""

    now: bool
    missing: tuple[str, ...] = ()
    """Uids of the replicas that have not loaded it yet."""
