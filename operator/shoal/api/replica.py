"""Messages of `GET /v1/replica`, the agent's stream (streams.md).

Server-sent events, one JSON object per `data:` line, no `event:` field. The first message has `full: true` and every
key that the agent knows; later ones carry the keys that changed, with absolute values; null says that a key became
unknown. `seq` grows by one with each message that carries keys; a heartbeat (every 5 s) repeats the last `seq` and has
no keys. A gap in `seq` or another `boot` means: connect again. 12 s of silence: the stream is down and what it said is
unknown. A key that is absent from the full state is unknown, never zero. Unknown keys are ignored.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

HEARTBEAT_SECONDS = 5.0
SILENCE_SECONDS = 12.0

Phase = Literal["fetching", "loading", "ready", "stalled", "draining"]


class Message(BaseModel):
    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, serialize_by_alias=True, extra="ignore", frozen=True
    )


class StageProgress(Message):
    """What the stage container tells of itself, through a file."""

    state: Literal["fetching", "verifying", "done", "failed"]
    bytes_done: int = 0
    bytes_total: int | None = None
    """None: the source does not say."""
    reason: str | None = None
    """With `failed`: a reason of `reasons.py`, such as SourceUnreachable."""
    message: str | None = None


class AdapterState(Message):
    """One adapter at a replica."""

    state: Literal["staging", "loading", "loaded", "retiring", "failed"]
    """Requests go to it while it is `loaded`, under a lease. `retiring`: no new ones; it is unloaded when every gateway
    has acknowledged that none of its own runs."""
    reason: str | None = None
    """With `failed`: a reason of `reasons.py`."""
    message: str | None = None


class ReplicaKeys(Message):
    """The state of one replica. None is "unknown"."""

    phase: Phase | None = None
    fetched_bytes: int | None = None
    fetch_total_bytes: int | None = None
    engine_boot: str | None = None
    """Random per start of the engine's process; counters below belong to it."""
    running: int | None = None
    """Requests in the running batch."""
    waiting: int | None = None
    """Requests in the engine's queue."""
    waiting_tokens: int | None = None
    """Their prompt tokens that no cache covers."""
    kv_tokens_used: int | None = None
    """KV cache tokens in use, evictable prefix cache not counted."""
    kv_tokens_total: int | None = None
    prompt_tokens_total: int | None = None
    """Monotonic per engine boot."""
    generation_tokens_total: int | None = None
    """Monotonic per engine boot."""
    max_running: int | None = None
    """Requests that the engine runs at a time at most."""
    adapters: dict[str, AdapterState] | None = None
    """By engine name, what this boot of the engine has or is about to have; the whole map each time. None: adapters are
    not served here, or after a restart the floor is not loaded yet."""
    adapter_slots: int | None = None
    """Distinct adapters that leases may cover at once."""
    adapter_slots_leased: int | None = None
    adapters_waiting: int | None = None
    """Callers that wait for a slot."""
    adapter_loads_total: int | None = None
    """Loads by the engine, monotonic per boot of the agent."""
    adapter_evictions_total: int | None = None
    """Adapters that went because others needed the place, monotonic per boot of the agent."""


class ReplicaMessage(Message):
    """One event of the stream."""

    boot: str
    """The agent's boot id."""
    seq: int
    full: bool = False
    keys: ReplicaKeys | None = None
    """None in a heartbeat. Only the keys present in the JSON are meant (`model_fields_set`)."""


class Ack(Message):
    """Body of `POST /v1/replica/ack`: "I act on what you said up to `seq`; so much of mine is in flight here".

    Sent on every change of the phase, when `running` falls to 0 while the replica drains, and every 5 s. Answered with
    204; 409 when `agent_boot` is not the agent's (the caller listens to a former one: connect again).
    """

    gateway: str
    """Name of the gateway's pod, as in HEADER_CALLER of its stream."""
    boot: str
    """The gateway's boot id, as in HEADER_BOOT of its stream."""
    agent_boot: str
    seq: int
    running: int
    """Requests of this gateway that were sent to this replica and have not ended."""
    running_by_adapter: dict[str, int] = {}
    """The same of each adapter that runs here, by engine name."""
