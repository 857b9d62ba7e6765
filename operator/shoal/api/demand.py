"""Messages of `GET /v1/demand`, the gateway's stream (streams.md).

The same rules as the agent's stream (`replica.py`): the first message is full, later ones carry the Models that
changed, with absolute values; null says that a Model has nothing any more. `seq` grows by one with each message that
carries `models`; a heartbeat every 5 s repeats the last one. Demand is a state that is repeated, never an edge.
"""

from typing import Final

from shoal.api.replica import Amount, Id, Message, Seconds, Tally

MOST_NAMED: Final = 200_000
"""Models, adapters or tenants that one gateway may name, all its messages together."""
_READ_BY_DECISIONS: Final = frozenset({"arrivals", "in_flight", "held"})


class ModelDemand(Message):
    """What one gateway has of one Model. What a gateway leaves out, as one of another version may, has its default here
    and is unknown all the same: see `whole`."""

    arrivals: Tally = 0
    """Accepted requests, monotonic per boot of the gateway."""
    in_flight: Tally = 0
    """Requests at replicas."""
    held: Tally = 0
    """Requests that wait here."""
    held_tokens: Tally = 0
    """Their prompts and bounded answers, estimated."""
    oldest_seconds: Seconds = 0.0
    """Age of the oldest that waits, when the message was made."""

    @property
    def whole(self) -> bool:
        """Everything that a smaller number of replicas rests on was said."""
        return self.model_fields_set >= _READ_BY_DECISIONS


class AdapterDemand(Message):
    """What one gateway has of one adapter."""

    model: Id
    """Uid of the Model whose replicas serve it."""
    arrivals: Tally = 0
    """Accepted requests, monotonic per boot of the gateway."""
    in_flight: Tally = 0
    held: Tally = 0
    """Requests that wait here for a replica, a slot or the adapter itself."""
    misses: Tally = 0
    """Of the arrivals, those that found it at no replica; monotonic."""


class TenantUse(Message):
    """What one gateway has of one tenant that has limits or a budget."""

    requests: Tally = 0
    """Accepted requests, monotonic per boot of the gateway."""
    tokens: Tally = 0
    """Input and output tokens of requests that ended, monotonic per boot of the gateway."""
    booked: Tally = 0
    """Of `tokens`, those that the engine counted: what the ledger's total has, or will have. Monotonic per boot."""
    reserved_tokens: Tally = 0
    """Of requests that have not ended: what they may still use."""
    in_flight: Tally = 0
    """Accepted requests that have not ended."""
    spent: Amount = 0
    """Money of requests that ended, at the price list in force, in 10^-12 of its currency; monotonic per boot."""
    reserved_spend: Amount = 0
    """Of requests that have not ended, in the same unit."""


class DemandMessage(Message):
    """One event of the stream."""

    boot: Id
    """The gateway's boot id."""
    seq: Tally
    full: bool = False
    models: dict[str, ModelDemand | None] | None = None
    """By uid of the Model; None in a heartbeat. In a full message a Model that is absent has nothing."""
    adapters: dict[str, AdapterDemand | None] | None = None
    """By uid of the LoRAAdapter, in the same way: those that changed; in a full message those that were ever asked."""
    tenants: dict[str, TenantUse | None] | None = None
    """By name of the Tenant, in the same way: those with limits or a budget."""
    currency: str | None = None
    """Of the price list in force, in full messages; None: the gateway knows none. Another one makes a full message."""
