"""What gateways and operators say to an agent about adapters (streams.md, "Slots"); JSON, camelCase.

`POST /v1/adapters/{engine name}/ensure` with an `Ensure` (gateways; operators to load ahead): 200 with a `Lease` when
the adapter is resident, else an `AdapterRefusal`: 409 the caller's stream is not known here or is of another boot of
this agent, 422 the adapter can never be loaded here as it is, 503 not now (slots full for `waitSeconds`, draining,
engine down or restarted meanwhile, load failed or hangs).

`PUT /v1/adapters` with a `Floor` (operators): 204. What the replica should hold from now on; the latest floor counts.

What the agent has is in its stream: `ReplicaKeys.adapters`.
"""

from typing import Annotated, Final

from pydantic import Field, StringConstraints

from shoal.api.loraadapter import Digest
from shoal.api.replica import Message

LEASE_SECONDS: Final = 10.0
"""How long a lease holds after the gateway was last heard to use it: its grant, or an acknowledgement that shows the
adapter running."""
ENSURE_SECONDS: Final = 60.0
"""Longest `waitSeconds`."""

EngineName = Annotated[str, StringConstraints(max_length=256, pattern=r"^[a-z0-9-]+\.[a-z0-9.-]+@[0-9a-f]{12}$")]


class AdapterWanted(Message):
    """One revision of an adapter, as an agent needs it to stage and load it."""

    name: EngineName
    revision: Digest
    uri: Annotated[str, StringConstraints(max_length=1024)]


class Ensure(AdapterWanted):
    """A caller wants to use the adapter now."""

    gateway: str
    """Name of the caller's pod, as in HEADER_CALLER of its stream."""
    boot: str
    """Its boot id, as in HEADER_BOOT of its stream."""
    agent_boot: str
    wait_seconds: Annotated[float, Field(ge=0, le=ENSURE_SECONDS)] = 30.0
    """How long the caller waits for a slot and for loading."""


class Lease(Message):
    """The adapter is resident and will not be evicted while the lease holds."""

    name: str
    engine_boot: str
    """The engine's boot that has it: with another one the lease is over."""
    seconds: float = LEASE_SECONDS
    loaded: bool = False
    """It was not resident before."""
    staged_seconds: float = 0.0
    """What fetching and verifying took, of this call."""
    load_seconds: float = 0.0
    """What the engine took to load it, of this call."""
    waited_seconds: float = 0.0
    """What waiting for a slot or for other loads took."""


class AdapterRefusal(Message):
    """Why there is no lease."""

    reason: str
    """A reason of `reasons.py`."""
    message: str
    retry_after: int | None = None


class FloorAdapter(AdapterWanted):
    """An adapter that the replica should hold."""

    pinned: bool = False
    """Never evicted."""


class Floor(Message):
    """What a replica should hold, from the leading operator."""

    operator: str
    """Name of the operator's pod."""
    boot: str
    adapters: Annotated[tuple[FloorAdapter, ...], Field(max_length=4096)] = ()
