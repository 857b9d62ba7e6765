"""The ledger's API: `POST /v1/records` and `GET /v1/totals` (streams.md).

`POST /v1/records`: a JSON array of usage records (`usage.UsageRecord`, any kind), as the spool has them, optionally
with `Content-Encoding: zstd`. It is answered with `BatchAnswer` after the commit. A record is identified by (source,
id) and stored once, so a batch may be sent any number of times. A record that does not validate is quarantined and
counted, never refused: a gateway could only send it again. Where the ledger requires the pod's token
(`names.HEADER_POD_TOKEN`), a record of another gateway is quarantined too; a batch without a valid token gets a 403 and
is sent again.

`GET /v1/totals`: a stream with the rules of `replica.py`: the first message is full, later messages carry the tenants
that changed; a heartbeat every 5 s; after 12 s of silence the totals are unknown.
"""

from typing import Literal

from shoal.api.replica import Message

UnknownCached = Literal["Fresh", "Cached"]
"""How input tokens are priced when the number of cached tokens is unknown, as after a cut stream."""


class BatchAnswer(Message):
    """Answer to a batch of records, after its commit."""

    new: int
    known: int
    """Records that the ledger already had."""
    aside: int = 0
    """Quarantined records: they do not validate or belong to another gateway."""


class Counted(Message):
    """Part of a total that one gateway's counters also contain."""

    tokens: int = 0
    spent: int = 0
    """In 10^-12 of the price list's currency."""


class TenantTotal(Message):
    """Usage of a tenant in the current calendar month (UTC), from final records in the ledger."""

    requests: int = 0
    tokens: int = 0
    """Input and output tokens."""
    spent: int = 0
    """Cost minus credits, in 10^-12 of the price list's currency."""
    gateways: dict[str, Counted] = {}
    """By boot id, for each gateway that is connected or was seen in the last 24 hours: the part of its counters since
    its start that is in the total. A request is either in the total or only in its gateway's counters, never in
    both."""


class Rate(Message):
    """One price, in millionths of the currency per million tokens, which is 10^-12 of it per token: tokens times rate
    is the exact amount in 10^-12 of the currency."""

    plan: str | None = None
    """None: applies to tenants without a plan, and to plans without a price of their own for the model."""
    model: str
    """namespace/name, or * for every model without a price of its own."""
    adapter: str | None = None
    """namespace/name, or * for every adapter of the model; None: the model without an adapter."""
    input: int
    cached: int
    output: int
    documents: int | None = None
    """Of a document, in 10^-12 of the currency, as the following. None: there is no price for it, unlike 0."""
    images: int | None = None
    audio_ms: int | None = None
    """Of a millisecond of audio."""


class Prices(Message):
    """The price list in force."""

    list: str
    """Name of the price list."""
    currency: str
    unknown_cached: UnknownCached = "Fresh"
    rates: tuple[Rate, ...] = ()


class TotalsMessage(Message):
    """One event of `GET /v1/totals`."""

    boot: str
    seq: int
    full: bool = False
    month: str | None = None
    """Calendar month, such as 2026-11. A new month restarts all totals and is announced by a full message."""
    tenants: dict[str, TenantTotal | None] | None = None
    """By name of the Tenant; None in a heartbeat."""
    prices: Prices | None = None
    """Prices, in a full message and when they change. None in a full message: no price list is in force."""
    prices_refused: str | None = None
    """Why the ledger refuses the price lists in its folder, in full messages; None: it does not. A change causes a full
    message."""
