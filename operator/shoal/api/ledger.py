"""What the ledger says and hears: `POST /v1/records`, `GET /v1/totals`, and its errors (streams.md).

`POST /v1/records`: a JSON array of usage records (`usage.UsageRecord`, any kind), as the spool has them, optionally
with `Content-Encoding: zstd`. It is answered after the commit with `Taken`. A record that is known already (source,
id) is
taken again without effect, so a batch may be sent as often as it takes. A record that does not validate is kept aside
and counted, never refused: a gateway could do nothing but send it again. So is one that is another gateway's, where
the ledger asks for the pod's token (`names.HEADER_POD_TOKEN`); without a token that proves a pod the whole batch gets a
403 and is sent again.

`GET /v1/totals`: a stream like the others (`replica.py`): the first message is full, later ones carry the tenants that
changed; a heartbeat every 5 s; 12 s of silence: the totals are unknown.
"""

from typing import Literal

from shoal.api.replica import Message

UnknownCached = Literal["Fresh", "Cached"]
"""How input is priced of which it is not known how much was cached, as after a cut stream."""


class BatchAnswer(Message):
    """Answer to a batch, after its commit."""

    new: int
    known: int
    """Already there."""
    aside: int = 0
    """Kept aside, because they do not validate or are another gateway's."""


class Counted(Message):
    """What a total contains of one gateway's own counters."""

    tokens: int = 0
    spent: int = 0
    """In 10^-12 of the price list's currency."""


class TenantTotal(Message):
    """What a tenant used in this calendar month (UTC), by final rows that the ledger has."""

    requests: int = 0
    tokens: int = 0
    """Input and output."""
    spent: int = 0
    """Credits taken off; in 10^-12 of the price list's currency."""
    gateways: dict[str, Counted] = {}
    """By boot id of the gateway, those that are connected or were heard in the last 24 hours: how much of its counters
    since its start is in the total. A gateway's request is in either of the two, never in both."""


class Rate(Message):
    """One price, in millionths of the currency per million tokens, which is 10^-12 of it per token: an amount is
    tokens times rate, exactly."""

    plan: str | None = None
    """None: tenants without a plan, and plans without a price of their own for the model."""
    model: str
    """namespace/name, or * for every one without a price of its own."""
    adapter: str | None = None
    """namespace/name, or * for every adapter of the model; None: the model without one."""
    input: int
    cached: int
    output: int


class Prices(Message):
    """The price list in force."""

    list: str
    """Its name."""
    currency: str
    unknown_cached: UnknownCached = "Fresh"
    rates: tuple[Rate, ...] = ()


class TotalsMessage(Message):
    """One event of `GET /v1/totals`."""

    boot: str
    seq: int
    full: bool = False
    month: str | None = None
    """Such as 2026-11. With another month all totals begin anew, and a full message says so."""
    tenants: dict[str, TenantTotal | None] | None = None
    """By name of the Tenant; None in a heartbeat."""
    prices: Prices | None = None
    """In a full message, and where they changed. None there: no price list is in force."""
