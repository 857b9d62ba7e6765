"""Answer of the operator's `GET /v1/adapters` on OPS_PORT, read by `kubectl shoal adapters`."""

from datetime import datetime

from shoal.api.replica import Message


class AdapterStats(Message):
    """Current state of one LoRAAdapter. None: unknown."""

    adapter: str
    """namespace/name."""
    residency: str
    revision: str | None = None
    """Revision in service: the 12 hex digits of its engine name."""
    next: str | None = None
    """Revision that will replace it, in the same form."""
    rank: int | None = None
    size_bytes: int | None = None
    ready: str = "Unknown"
    """Status of the condition Ready."""
    reason: str = ""
    message: str = ""
    wanted: int | None = None
    """Copies that replicas should keep; None: the adapter is loaded on demand only."""
    resident: tuple[str, ...] | None = ()
    """Pods that have the adapter loaded; None: no replica has a live stream."""
    desired: tuple[str, ...] = ()
    """Pods that should keep the adapter."""
    in_flight: int | None = None
    held: int | None = None
    arrivals: int | None = None
    """Requests since the start of the gateways with live streams."""
    misses: int | None = None
    """Requests that found the adapter on no replica."""
    last_used: datetime | None = None
    """When the operator last saw a request for the adapter; None: none since this operator became leader."""


class ReplicaAdapters(Message):
    """Current state of one replica of a pool. None: unknown."""

    pod: str
    ready: bool
    live: bool
    slots: int | None = None
    """Distinct adapters that requests can use at the same time."""
    leased: int | None = None
    waiting: int | None = None
    """Callers that wait for a free slot."""
    loaded: int | None = None
    failed: int | None = None
    loads: int | None = None
    """Loads since the agent started."""
    evictions: int | None = None


class PoolStats(Message):
    """Current state of one LoRAPool."""

    pool: str
    """namespace/name."""
    model: str
    """namespace/name."""
    slots: int
    """Adapter slots per replica."""
    cached: int
    """Adapters kept in the host memory of one replica."""
    ready: str = "Unknown"
    reason: str = ""
    message: str = ""
    stale: tuple[str, ...] = ()
    """Gateways whose signals are stale; their requests are missing from these numbers."""
    replicas: tuple[ReplicaAdapters, ...] = ()
    adapters: tuple[AdapterStats, ...] = ()


class AdapterStatsAnswer(Message):
    """The whole answer."""

    operator: str
    """Name of the operator's pod."""
    time: datetime
    pools: tuple[PoolStats, ...] = ()
