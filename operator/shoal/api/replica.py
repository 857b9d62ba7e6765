"""Messages of `GET /v1/replica`, the agent's stream (streams.md).

Server-sent events, one JSON object per `data:` line, no `event:` field. The first message has `full: true` and every
key that the agent knows; later ones carry the keys that changed, with absolute values; null says that a key became
unknown. `seq` grows by one with each message that carries keys; a heartbeat (every 5 s) repeats the last `seq` and has
no keys. A gap in `seq` or another `boot` means: connect again. 12 s of silence: the stream is down and what it said is
unknown. A key that is absent from the full state is unknown, never zero. Unknown keys are ignored.
"""

from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel

HEARTBEAT_SECONDS = 5.0
SILENCE_SECONDS = 12.0

MOST_ADAPTERS: Final = 8192
"""That one replica may name; a floor has half as many at most."""

# What a peer says is bounded before anybody computes with it: a message that is not is not understood, and what the
# peer says is then unknown. A sentence for people is cut instead.
Tally = Annotated[int, Field(ge=0, le=2**53 - 1)]
"""A count: small enough for sums of all peers, and for every reader of JSON."""
Amount = Annotated[int, Field(ge=-(10**30), le=10**30)]
"""Money, in 10^-12 of its currency."""
Seconds = Annotated[float, Field(ge=-1e9, le=1e9, allow_inf_nan=False)]
Id = Annotated[str, StringConstraints(max_length=512)]
Sentence = Annotated[str, AfterValidator(lambda text: text[:4096])]

RID: Final = r"^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}(\.[1-9][0-9]{0,3})?$"
"""An engine's id of a request: what `gateway/ids.py` makes, and which try."""
MOST_PROMPTS: Final = 64
"""Of one request that may be aborted."""

Phase = Literal["fetching", "loading", "ready", "stalled", "draining"]


class Message(BaseModel):
    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, serialize_by_alias=True, extra="ignore", frozen=True
    )


class StageProgress(Message):
    """What the stage container tells of itself, through a file."""

    state: Literal["fetching", "verifying", "done", "failed"]
    bytes_done: Tally = 0
    bytes_total: Tally | None = None
    """None: the source does not say."""
    reason: Id | None = None
    """With `failed`: a reason of `reasons.py`, such as SourceUnreachable."""
    message: Sentence | None = None


class AdapterState(Message):
    """One adapter at a replica."""

    state: Literal["staging", "loading", "loaded", "retiring", "failed"]
    """Requests go to it while it is `loaded`, under a lease. `retiring`: no new ones; it is unloaded when every gateway
    has acknowledged that none of its own runs."""
    reason: Id | None = None
    """With `failed`: a reason of `reasons.py`."""
    message: Sentence | None = None


class ReplicaKeys(Message):
    """The state of one replica. None is "unknown"."""

    phase: Phase | None = None
    fetched_bytes: Tally | None = None
    fetch_total_bytes: Tally | None = None
    engine_boot: Id | None = None
    """Random per start of the engine's process; counters below belong to it."""
    running: Tally | None = None
    """Requests in the running batch."""
    waiting: Tally | None = None
    """Requests in the engine's queue."""
    waiting_tokens: Tally | None = None
    """Their prompt tokens that no cache covers."""
    kv_tokens_used: Tally | None = None
    """KV cache tokens in use, evictable prefix cache not counted."""
    kv_tokens_total: Tally | None = None
    prompt_tokens_total: Tally | None = None
    """Monotonic per engine boot."""
    generation_tokens_total: Tally | None = None
    """Monotonic per engine boot."""
    max_running: Tally | None = None
    """Requests that the engine runs at a time at most."""
    adapters: Annotated[dict[Id, AdapterState], Field(max_length=MOST_ADAPTERS)] | None = None
    """By engine name, what this boot of the engine has or is about to have; the whole map each time. None: adapters are
    not served here, or after a restart the floor is not loaded yet."""
    adapter_slots: Tally | None = None
    """Distinct adapters that leases may cover at once."""
    adapter_slots_leased: Tally | None = None
    adapters_waiting: Tally | None = None
    """Callers that wait for a slot."""
    adapter_loads_total: Tally | None = None
    """Loads by the engine, monotonic per boot of the agent."""
    adapter_evictions_total: Tally | None = None
    """Adapters that went because others needed the place, monotonic per boot of the agent."""


class ReplicaMessage(Message):
    """One event of the stream."""

    boot: Id
    """The agent's boot id."""
    seq: Tally
    full: bool = False
    keys: ReplicaKeys | None = None
    """None in a heartbeat. Only the keys present in the JSON are meant (`model_fields_set`)."""


class Ack(Message):
    """Body of `POST /v1/replica/ack`: "I act on what you said up to `seq`; so much of mine is in flight here".

    Sent on every change of the phase, when `running` falls to 0 while the replica drains, and every 5 s. Answered with
    204; 409 when `agent_boot` is not the agent's (the caller listens to a former one: connect again).
    """

    gateway: Id
    """Name of the gateway's pod, as in HEADER_CALLER of its stream."""
    boot: Id
    """The gateway's boot id, as in HEADER_BOOT of its stream."""
    agent_boot: Id
    seq: Tally
    running: Tally
    """Requests of this gateway that were sent to this replica and have not ended."""
    running_by_adapter: Annotated[dict[Id, Tally], Field(max_length=MOST_ADAPTERS)] = {}
    """The same of each adapter that runs here, by engine name."""


class Abort(Message):
    """Body of `POST /v1/replica/abort`: "my client has left, so the engine may end this request now".

    The engine then ends its answer with what it has, and its usage block says what it computed. Answered with 204, also
    where the engine has no such request (any more, or yet: whoever hears nothing may ask again); 503 when the engine
    could not be asked. SGLang ends every request whose id begins with the one that it is given, an empty one all of
    them: so an id is whole, and of the gateways' own form.
    """

    rid: Annotated[str, StringConstraints(pattern=RID, max_length=64)]
    """The id under which the engine has the request: that of the request, and from the second try on `.` and which."""
    prompts: Annotated[int, Field(ge=0, le=MOST_PROMPTS)] = 0
    """It may have a list of so many prompts: SGLang adds `_` and the place of each to the id."""
