"""Messages of `GET /v1/demand`, the gateway's demand stream (streams.md).

The rules of the agent's stream apply (`replica.py`): the first message is full, later messages carry the Models that
changed, with absolute values; null means that a Model has no demand any more. `seq` grows by one with each message that
carries `models`; a heartbeat every 5 s repeats the last `seq`. Demand is sent as repeated state, never as an event.
"""

from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from shoal.api.replica import Amount, Id, Message, Seconds, Tally

MOST_NAMED: Final = 200_000
"""Models, adapters or tenants that one gateway may name over all its messages."""
MOST_RECENT: Final = 20_000
"""Entries of `TenantUse.recent` that one message may have, and as many of `DemandMessage.tenants_gone`: reading them
must not delay requests."""
MOST_GONE: Final = 64
"""Processes that `DemandMessage.tenants_gone` may name."""
MOST_FIRST_TOKENS: Final = 32
"""Replicas of one Model of which a gateway tells the first token."""
_READ_BY_DECISIONS: Final = frozenset({"arrivals", "in_flight", "held"})


class FirstToken(Message):
    """The first request that the gateway sent to a replica. Only of replicas whose engine it saw become ready."""

    after: Seconds
    """From the engine's readiness until the request was sent."""
    seconds: Seconds | None = None
    """To the first token of its answer: from the engine's readiness if the request waited for it, else from when it was
    sent. None: unknown, since the answer was not a stream, or did not begin."""


class ModelDemand(Message):
    """Demand of one Model at one gateway. A field that the gateway leaves out (a gateway of another version may) has
    its default here but is unknown: see `whole`."""

    arrivals: Tally = 0
    """Accepted requests, monotonic per boot of the gateway."""
    in_flight: Tally = 0
    """Requests that are at replicas."""
    held: Tally = 0
    """Requests on hold at this gateway."""
    held_tokens: Tally = 0
    """Estimated tokens of the held requests: prompts and bounded outputs."""
    oldest_seconds: Seconds = 0.0
    """Age of the oldest held request, in seconds, when the message was made."""
    first_tokens: Annotated[dict[Id, FirstToken], Field(max_length=MOST_FIRST_TOKENS)] = {}
    """By uid of the pod: the last replicas of which this gateway knows it."""

    @property
    def whole(self) -> bool:
        """Whether the message contains every field that a scale-down depends on."""
        return self.model_fields_set >= _READ_BY_DECISIONS


class AdapterDemand(Message):
    """Demand of one adapter at one gateway."""

    model: Id
    """Uid of the Model whose replicas serve the adapter."""
    arrivals: Tally = 0
    """Accepted requests, monotonic per boot of the gateway."""
    in_flight: Tally = 0
    held: Tally = 0
    """Requests on hold for a replica, a slot or the adapter itself."""
    misses: Tally = 0
    """Arrivals that found the adapter on no replica, monotonic per boot of the gateway."""


Age = Annotated[int, Field(ge=0, le=60)]
"""Whole seconds."""
RecentUse = Annotated[tuple[tuple[Age, Tally, Tally], ...], Field(max_length=61)]
"""Use in the last 60 s: age, requests and tokens of ended requests."""


class TenantUse(Message):
    """Usage of one tenant with limits or a budget at one gateway, or of one tenant under a ModelRoute with limits."""

    epoch: Tally = 0
    """Another number than before: `requests` and `tokens` have begun at zero again. For one name no number comes twice
    in a boot of the gateway."""
    requests: Tally = 0
    """Accepted requests, monotonic per boot of the gateway and epoch."""
    tokens: Tally = 0
    """Input and output tokens of ended requests, monotonic in the same way."""
    booked: Tally = 0
    """Part of `tokens` that engines counted. These tokens are, or will be, in the ledger's total. Monotonic per
    boot."""
    reserved_tokens: Tally = 0
    """Tokens that requests in progress may still use."""
    in_flight: Tally = 0
    """Accepted requests that have not ended."""
    spent: Amount = 0
    """Cost of ended requests at the price list in force, in 10^-12 of its currency, monotonic per boot."""
    reserved_spend: Amount = 0
    """Cost that requests in progress may still cause, in the same unit."""
    recent: RecentUse | None = None
    """The part of `requests` and `tokens` that was used in the last 60 s, in the first message of a stream to another
    gateway: it replaces what the reader knew of this part. None: the reader knows it already, or the gateway is of an
    older version, or has too many tenants."""


class HaltedCanary(Message):
    """A canary of a ModelRoute that a gateway has halted."""

    reason: Literal["Errors", "Slow"]
    bad: Tally
    """Requests that failed, or waited too long for the first byte."""
    of: Tally
    """Requests that were judged."""


class CanaryCount(Message):
    """Ended requests of a canary of a ModelRoute at one gateway, each monotonic per boot of the gateway for as long as
    the gateway knows the canary. Other gateways use the differences to the message before."""

    requests: Tally = 0
    """Requests that were answered or failed, and streams of which `left` counts."""
    failed: Tally = 0
    streams: Tally = 0
    """Streams of a canary that has a limit for their time to the first byte, answered or left."""
    slow: Tally = 0
    """Streams that took longer."""
    left: Tally = 0
    """Streams whose clients left, after the first byte or after more than the limit."""

    @model_validator(mode="after")
    def _parts(self) -> Self:
        if self.failed + self.streams > self.requests or max(self.slow, self.left) > self.streams:
            raise ValueError("a part is more than the whole")
        return self


class DemandMessage(Message):
    """One event of the stream."""

    boot: Id
    """The gateway's boot id."""
    seq: Tally
    full: bool = False
    models: dict[str, ModelDemand | None] | None = None
    """By uid of the Model; None in a heartbeat. In a full message, an absent Model has no demand."""
    adapters: dict[str, AdapterDemand | None] | None = None
    """By uid of the LoRAAdapter, in the same way: the adapters that changed; in a full message, every adapter that was
    ever requested."""
    tenants: dict[str, TenantUse | None] | None = None
    """By name of the Tenant, in the same way: tenants with limits or a budget. `TENANT@UID`: what a tenant sent under
    the ModelRoute of this uid, which has limits of each tenant; null: nothing that a limit needs any more, and its
    counters begin at zero again."""
    tenants_partial: bool = False
    """In a full message: it leaves out some of `TENANT@UID`, since all would be too long, and one with running requests
    only if it names none without. The counters that the reader knows of an absent one stay; in another full message an
    absent one has nothing."""
    tenants_gone: Annotated[dict[Id, dict[Id, RecentUse]], Field(max_length=MOST_GONE)] | None = None
    """By boot id, and by name as in `tenants`: what this gateway knows of the last 60 s at gateways whose streams
    to it have ended. In the first message of a stream to another gateway, which may have started too late to read those
    streams, or be the successor of one of these gateways."""
    currency: str | None = None
    """Currency of the price list in force, in full messages; None: the gateway has no price list. A change of currency
    causes a full message."""
    prices_refused: str | None = None
    """Why the ledger refuses the price lists in its folder, in the same way; None: it does not, as far as the gateway
    knows."""
    canaries: dict[str, HaltedCanary] | None = None
    """By revision of the canary, in full messages: canaries that this gateway does not send requests to any more. A
    change causes a full message."""
    canary_counts: dict[str, CanaryCount | None] | None = None
    """By revision of the canary: the canaries that changed; in a full message, every canary that this gateway knows and
    has sent a request to."""
