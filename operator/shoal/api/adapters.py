"""The agent's API for adapters (streams.md, "Slots"): requests of gateways and operators. JSON, camelCase.

`POST /v1/adapters/{engine name}/ensure` with an `Ensure`: a gateway needs the adapter, or an operator preloads it. 200
with a `Lease` when the adapter is resident, else an `AdapterRefusal`: 409 the caller has no stream to this agent, or
its stream is to an earlier start of this agent; 422 this revision of the adapter can never be loaded here; 503 not now
(no free slot within `waitSeconds`, draining, engine down or restarted, load failed or hangs).

`PUT /v1/adapters` with `DesiredAdapters` (operators): 204. The adapters that the replica should hold; each call
replaces the previous list.

The adapters that an agent has are in its stream: `ReplicaKeys.adapters`.
"""

from typing import Annotated, Final

from pydantic import Field, StringConstraints

from shoal.api.artifact import LayerWidths
from shoal.api.loraadapter import Digest
from shoal.api.replica import Message

LEASE_SECONDS: Final = 10.0
"""Duration of a lease. It runs from the grant, or from the gateway's last acknowledgement that counts the adapter as
running. A gateway gives it back before, if others wait for a slot and nothing of it runs there."""
ENSURE_SECONDS: Final = 60.0
"""Longest `waitSeconds`."""

EngineName = Annotated[str, StringConstraints(max_length=256, pattern=r"^[a-z0-9-]+\.[a-z0-9.-]+@[0-9a-f]{12}$")]


ADAPTERS_ENV: Final = "SHOAL_AGENT_ADAPTERS"
"""Environment variable of the agent: `AdapterSettings` as JSON. Absent: the Model has no pool."""


class AdapterSettings(Message):
    """The LoRAPool settings with which an agent starts. Changing them replaces the pod."""

    pool: str
    """`namespace/name`, for messages."""
    slots: Annotated[int, Field(ge=2)]
    """Adapter slots in GPU memory. The base model takes one, so leases cover at most `slots` - 1 adapters."""
    cached: Annotated[int, Field(ge=2)]
    """Adapters that the engine keeps in host memory (`--max-loaded-loras`) and whose files stay on disk."""
    max_rank: Annotated[int, Field(ge=1)]
    target_modules: tuple[str, ...]
    """Target modules of the pool; ("all",): every module."""
    max_bytes: Annotated[int, Field(ge=1)]
    """Size limit for the files of one adapter, in bytes. The adapter folder has room for 2 * `cached` adapters of that
    size."""
    credentials: tuple[str, ...] = ()
    """URI prefixes of sources: the Secret of the i-th prefix is mounted at ADAPTER_SECRETS_DIR/i. The longest matching
    prefix applies; a source that matches none is read without credentials."""
    architecture: str | None = None
    """Architecture of the base model, such as LlamaForCausalLM; None: unknown."""
    widths: LayerWidths | None = None
    """Layer widths of the base model; None: unknown, and the shapes of adapters are not checked."""
    vocabulary: int | None = None
    """Vocabulary size of the base model; None: unknown."""


class AdapterWanted(Message):
    """One revision of an adapter: what an agent needs to stage and load it."""

    name: EngineName
    revision: Digest
    uri: Annotated[str, StringConstraints(max_length=1024)]


class Ensure(AdapterWanted):
    """A request for a lease: the caller is about to use the adapter."""

    gateway: str
    """Name of the calling pod, as in HEADER_CALLER of its stream."""
    boot: str
    """The caller's boot id, as in HEADER_BOOT of its stream."""
    agent_boot: str
    wait_seconds: Annotated[float, Field(ge=0, le=ENSURE_SECONDS)] = 30.0
    """How long the caller waits for a free slot and for the load, in seconds."""


class Lease(Message):
    """The adapter is resident and will not be evicted while the lease holds."""

    name: str
    engine_boot: str
    """Boot id of the engine that holds the adapter. The lease ends when the engine restarts."""
    seq: int = 0
    """Sequence number of the stream message that reported the adapter as `loaded`. A gateway may send a request under
    the lease only after it has read the stream up to `seq`, and only while the stream still reports the adapter as
    `loaded`. Otherwise a lease that arrives late would outlive a retirement that the gateway has already
    acknowledged."""
    seconds: float = LEASE_SECONDS
    grant: int = 0
    """Number of this grant, by which the gateway gives the lease back (`Ack.given_back`). 0: it cannot be given
    back."""
    loaded: bool = False
    """This call loaded the adapter; it was not resident before."""
    staged_seconds: float = 0.0
    """Time that this call spent on fetching and verifying."""
    load_seconds: float = 0.0
    """Time that the engine spent on loading for this call."""
    waited_seconds: float = 0.0
    """Time that this call waited for a slot or for other loads."""


class AdapterRefusal(Message):
    """Why no lease was granted."""

    reason: str
    """A reason from `reasons.py`."""
    message: str
    retry_after: int | None = None


class DesiredAdapter(AdapterWanted):
    """An adapter that the replica should hold."""

    pinned: bool = False
    """The adapter is never evicted."""


class DesiredAdapters(Message):
    """The adapters that a replica should hold, as decided by the leading operator."""

    operator: str
    """Name of the operator's pod."""
    boot: str
    adapters: Annotated[tuple[DesiredAdapter, ...], Field(max_length=4096)] = ()
