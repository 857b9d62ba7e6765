"""What the operator tells of adapters: `GET /v1/adapters` on its OPS_PORT, read by `kubectl shoal adapters`."""

from datetime import datetime

from shoal.api.replica import Message


class AdapterFigures(Message):
    """One LoRAAdapter now. None: unknown."""

    adapter: str
    """namespace/name."""
    residency: str
    revision: str | None = None
    """Of the one that answers: the 12 digits of its engine name."""
    next: str | None = None
    """Of the one that is to take over."""
    rank: int | None = None
    size_bytes: int | None = None
    ready: str = "Unknown"
    """Status of the condition Ready."""
    reason: str = ""
    message: str = ""
    wanted: int | None = None
    """Copies that replicas are told to keep; None: on no floor, loaded when it is asked for."""
    resident: tuple[str, ...] | None = ()
    """Pods that have it loaded; None: no replica is heard."""
    desired: tuple[str, ...] = ()
    """Pods that are told to keep it."""
    in_flight: int | None = None
    held: int | None = None
    arrivals: int | None = None
    """Requests, since the gateways that are heard started."""
    misses: int | None = None
    """Of these, those that found it at no replica."""
    last_used: datetime | None = None
    """When the operator last heard of a request; None: not since it leads."""


class ReplicaAdapters(Message):
    """One replica of a pool. None: unknown."""

    pod: str
    ready: bool
    live: bool
    slots: int | None = None
    """Distinct adapters that requests may use at once."""
    leased: int | None = None
    waiting: int | None = None
    """Callers that wait for a slot."""
    loaded: int | None = None
    failed: int | None = None
    loads: int | None = None
    """By its engine, since its agent started."""
    evictions: int | None = None


class PoolFigures(Message):
    """One LoRAPool."""

    pool: str
    """namespace/name."""
    model: str
    """namespace/name."""
    slots: int
    """Per replica, for adapters."""
    cached: int
    """Adapters in a replica's host memory."""
    ready: str = "Unknown"
    reason: str = ""
    message: str = ""
    stale: tuple[str, ...] = ()
    """Gateways that are not heard: what they have is not in the figures."""
    replicas: tuple[ReplicaAdapters, ...] = ()
    adapters: tuple[AdapterFigures, ...] = ()


class AdapterFiguresAnswer(Message):
    """The whole answer."""

    operator: str
    """Name of the operator's pod."""
    time: datetime
    pools: tuple[PoolFigures, ...] = ()
