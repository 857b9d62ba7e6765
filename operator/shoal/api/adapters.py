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

from shoal.api.artifact import LayerWidths
from shoal.api.loraadapter import Digest
from shoal.api.replica import Message

LEASE_SECONDS: Final = 10.0
"""How long a lease holds after the gateway was last heard to use it: its grant, or an acknowledgement that shows the
adapter running."""
ENSURE_SECONDS: Final = 60.0
"""Longest `waitSeconds`."""

EngineName = Annotated[str, StringConstraints(max_length=256, pattern=r"^[a-z0-9-]+\.[a-z0-9.-]+@[0-9a-f]{12}$")]


ADAPTERS_ENV: Final = "SHOAL_AGENT_ADAPTERS"
"""Environment variable of the agent: `AdapterSettings` as JSON. Absent: the Model has no pool."""


class AdapterSettings(Message):
    """What an agent is told of its Model's pool when it starts; a change of it replaces the pod."""

    pool: str
    """`namespace/name`, for messages."""
    slots: Annotated[int, Field(ge=2)]
    """Places in GPU memory; the base model counts as one, so leases cover one adapter less."""
    cached: Annotated[int, Field(ge=2)]
    """Adapters that the engine keeps in host memory (`--max-loaded-loras`), and whose files are kept."""
    max_rank: Annotated[int, Field(ge=1)]
    target_modules: tuple[str, ...]
    """As the pool names them; ("all",) means every module."""
    max_bytes: Annotated[int, Field(ge=1)]
    """Most that the files of one adapter may have: the folder has room for twice `cached` of them."""
    credentials: tuple[str, ...] = ()
    """Prefixes of sources: the i-th one's Secret is mounted at ADAPTER_SECRETS_DIR/i. The longest that matches counts;
    without any that matches a source is read without credentials."""
    architecture: str | None = None
    """Of the base, such as LlamaForCausalLM; None: not known."""
    widths: LayerWidths | None = None
    """Of the base; None: not known, and an adapter's shapes are then not compared."""
    vocabulary: int | None = None
    """Of the base; None: not known."""


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
    seq: int = 0
    """Of the stream's message by which the adapter is `loaded`. A request may be sent under the lease once the gateway
    has read so far and the last that it read still says so: a lease that comes late must not outdo a retirement that
    was acknowledged meanwhile."""
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


class DesiredAdapter(AdapterWanted):
    """An adapter that the replica should hold."""

    pinned: bool = False
    """Never evicted."""


class DesiredAdapters(Message):
    """What a replica should hold, from the leading operator."""

    operator: str
    """Name of the operator's pod."""
    boot: str
    adapters: Annotated[tuple[DesiredAdapter, ...], Field(max_length=4096)] = ()
