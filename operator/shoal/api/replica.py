"""Messages of `GET /v1/replica`, the agent's stream (streams.md).

Server-sent events, one JSON object per `data:` line, no `event:` field. The first message has `full: true` and every
key that the agent knows; later messages carry the keys that changed, with absolute values; null means that a key became
unknown. `seq` grows by one with each message that carries keys; a heartbeat (every 5 s) repeats the last `seq` and has
no keys. On a gap in `seq` or another `boot` the reader reconnects. After 12 s of silence the stream is down and its
keys are unknown. A key that is absent from the full state is unknown, never zero. Unrecognized keys are ignored.
"""

from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel

HEARTBEAT_SECONDS = 5.0
SILENCE_SECONDS = 12.0

MOST_ADAPTERS: Final = 8192
"""Adapters that one replica may report at most; `DesiredAdapters` has at most half as many."""

# Values from a peer are bounded before they are used: a message with a value out of bounds is invalid, and the peer's
# state is then unknown. Sentences for people are cut instead.
MOST_TALLY: Final = 2**53 - 1
Tally = Annotated[int, Field(ge=0, le=MOST_TALLY)]
"""A count, small enough for sums over all peers and for every JSON parser."""
Amount = Annotated[int, Field(ge=-(10**30), le=10**30)]
"""Money, in 10^-12 of its currency."""
Seconds = Annotated[float, Field(ge=-1e9, le=1e9, allow_inf_nan=False)]
LONGEST_ID: Final = 512
Id = Annotated[str, StringConstraints(max_length=LONGEST_ID)]
Sentence = Annotated[str, AfterValidator(lambda text: text[:4096])]

RID: Final = r"^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}(\.[1-9][0-9]{0,3})?$"
"""The engine's request id: an id from `gateway/ids.py`, and the number of the attempt."""
MOST_PROMPTS: Final = 64
"""Prompts of one abortable request at most."""

Phase = Literal["fetching", "loading", "ready", "stalled", "draining"]


class Message(BaseModel):
    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, serialize_by_alias=True, extra="ignore", frozen=True
    )


class StageProgress(Message):
    """Progress of the stage container, written to STAGE_PROGRESS_FILE."""

    state: Literal["fetching", "verifying", "done", "failed"]
    bytes_done: Tally = 0
    bytes_total: Tally | None = None
    """None: unknown, because the source does not provide it."""
    reason: Id | None = None
    """With `failed`: a reason from `reasons.py`, such as SourceUnreachable."""
    message: Sentence | None = None


class AdapterState(Message):
    """State of one adapter at a replica."""

    state: Literal["staging", "loading", "loaded", "retiring", "failed"]
    """Requests are sent to an adapter while it is `loaded`, under a lease. `retiring`: no new requests; the adapter is
    unloaded when every gateway has acknowledged that it has none in flight."""
    reason: Id | None = None
    """With `failed`: a reason from `reasons.py`."""
    message: Sentence | None = None


class ReplicaKeys(Message):
    """State of one replica. None: unknown."""

    phase: Phase | None = None
    fetched_bytes: Tally | None = None
    fetch_total_bytes: Tally | None = None
    engine_boot: Id | None = None
    """Random per start of the engine's process; the counters below belong to this start."""
    running: Tally | None = None
    """Requests in the running batch."""
    waiting: Tally | None = None
    """Requests in the engine's queue."""
    waiting_tokens: Tally | None = None
    """Prompt tokens of the waiting requests, without tokens in the prefix cache."""
    kv_tokens_used: Tally | None = None
    """KV cache tokens in use, without the evictable prefix cache."""
    kv_tokens_total: Tally | None = None
    prompt_tokens_total: Tally | None = None
    """Monotonic per engine boot."""
    generation_tokens_total: Tally | None = None
    """Monotonic per engine boot."""
    max_running: Tally | None = None
    """Limit of concurrently running requests of the engine."""
    tokens_per_step: Annotated[float, Field(ge=1, le=1024, allow_inf_nan=False)] | None = None
    """Tokens per request and step of an engine with speculation, on average since its start."""
    graph_seconds: Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)] | None = None
    """Of the engine's start: captures of CUDA graphs. Not every engine says it."""
    adapters: Annotated[dict[Id, AdapterState], Field(max_length=MOST_ADAPTERS)] | None = None
    """By engine name: the adapters that this start of the engine has or is about to load. Always the whole map. None:
    no adapters are served here, or the desired adapters are not loaded yet after a restart."""
    adapter_slots: Tally | None = None
    """Distinct adapters that leases can cover at the same time."""
    adapter_slots_leased: Tally | None = None
    adapters_waiting: Tally | None = None
    """Callers that wait for a free slot."""
    adapter_loads_total: Tally | None = None
    """Loads, monotonic per boot of the agent."""
    adapter_evictions_total: Tally | None = None
    """Evictions for other adapters, monotonic per boot of the agent."""


class ReplicaMessage(Message):
    """One event of the stream."""

    boot: Id
    """The agent's boot id."""
    seq: Tally
    full: bool = False
    keys: ReplicaKeys | None = None
    """None in a heartbeat. Only the keys that are present in the JSON are valid (`model_fields_set`)."""


class Ack(Message):
    """Body of `POST /v1/replica/ack`: the gateway has applied the stream up to `seq` and has `running` requests in
    flight.

    It is sent on every change of the phase, when `running` falls to 0 while the replica drains, and every 5 s. Answers:
    204; 409 when `agent_boot` is not the agent's boot id (the caller's stream is to an earlier start: reconnect).
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
    """The same per adapter, by engine name."""
    given_back: Annotated[dict[Id, Tally], Field(max_length=MOST_ADAPTERS)] = {}
    """Leases that the gateway does not use and ends, since callers wait for a slot: engine name of the adapter ->
    `Lease.grant`."""


class Abort(Message):
    """Body of `POST /v1/replica/abort`: the client has disconnected, so the engine can end this request.

    The engine then completes the response with what it has, and the usage block contains what it computed. Answers:
    204, also when the engine does not have the request (any more, or yet: a caller that gets no response may repeat the
    call); 503 when the engine could not be reached. SGLang aborts every request whose id begins with the given id (an
    empty id: all requests), so `rid` must be a complete id in the gateways' format.
    """

    rid: Annotated[str, StringConstraints(pattern=RID, max_length=64)]
    """The engine's request id: the gateway's id, and from the second attempt on `.` and the number of the attempt."""
    prompts: Annotated[int, Field(ge=0, le=MOST_PROMPTS)] = 0
    """Number of prompts, for a request with a list of prompts: SGLang appends `_` and the index of each prompt to the
    id."""


CANARY_PROMPTS: Final = ("The capital of France is", "1, 2, 3, 4, 5, 6, 7,", "Monday, Tuesday, Wednesday,")
"""Prompts whose beginning of an answer no healthy engine weighs against another."""
CANARY_TOKENS: Final = 16


class CanaryAnswer(Message):
    """Answer of `POST /v1/canary?prompt=NUMBER`: what the engine writes after one of `CANARY_PROMPTS` at temperature 0.
    503 when it writes nothing: it is away, or its model generates no text. Agents of before have one prompt, whatever
    the number."""

    prompt: Id
    """The prompt itself."""
    text: Annotated[str, AfterValidator(lambda text: text[:512])]
