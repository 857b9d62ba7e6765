"""The ledger's answers about usage and money (docs/billing.md).

Amounts are decimal strings. `amount`, `usage`, `credit` and `total` are rounded to the smallest unit of the currency;
`exact` is not rounded. Prices are per million tokens, documents, images or seconds of audio. A field of a row is absent
when it was not part of the query, and null when the value is "none": an `adapter` of null is the base model without an
adapter.
"""

from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from shoal.api.ledger import UnknownCached
from shoal.api.replica import Message

By = Literal["tenant", "key", "externalID", "model", "adapter", "class", "plan", "route", "hour", "day", "month"]


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise PydanticCustomError("nul", "it has a NUL in it, which the database cannot hold: leave it out")
    return text


_WITHOUT_NUL: Final = AfterValidator(_without_nul)
"""PostgreSQL's texts cannot have the character 0, neither as a value nor as what is searched for."""


class TokenCounts(Message):
    """Sums over requests."""

    requests: int = 0
    input_tokens: int = 0
    """Cached input tokens included."""
    cached_tokens: int = 0
    unknown_cached_input_tokens: int = 0
    """Part of the input tokens: tokens of requests for which the number of cached tokens is unknown."""
    output_tokens: int = 0
    """Reasoning tokens included."""
    reasoning_tokens: int = 0
    unknown_requests: int = 0
    """Requests that reached an engine and whose usage is unknown."""
    documents: int = 0
    """Documents that were read together with a query."""
    images: int = 0
    audio_ms: int = 0
    """Length of transcribed audio and of sounds in chats, in milliseconds."""
    image_tokens: int = 0
    """Part of the input tokens, as the following. Only engines that tell them count."""
    audio_tokens: int = 0
    accepted_tokens: int = 0
    """Part of the output tokens: tokens of drafts that the model accepted (speculative decoding)."""


class UsageRow(TokenCounts):
    """Usage of one combination of the dimensions in `by`."""

    tenant: str | None = None
    key: str | None = None
    external_id: str | None = Field(None, validation_alias="externalID", serialization_alias="externalID")
    model: str | None = None
    adapter: str | None = None
    gpu_class: str | None = Field(None, validation_alias="class", serialization_alias="class")
    plan: str | None = None
    route: str | None = None
    hour: str | None = None
    day: str | None = None
    month: str | None = None


class UsagePage(Message):
    """Answer to `GET /v1/usage`."""

    start: str = Field(validation_alias="from", serialization_alias="from")
    end: str = Field(validation_alias="to", serialization_alias="to")
    by: tuple[By, ...] = ()
    rows: tuple[UsageRow, ...] = ()
    next: str | None = None
    """Cursor of the next page: repeat the query with `after` set to this value."""
    unseen: tuple[str, ...] = ()
    """Queried tenants that have never had any usage."""


class UsagePrices(Message):
    """Prices per million tokens, documents, images or seconds of audio."""

    input: str
    cached: str
    output: str
    documents: str | None = None
    """None: the price list has no price for them, unlike 0."""
    images: str | None = None
    audio_seconds: str | None = None


PricedUnit = Literal["documents", "images", "audioSeconds"]


class BillLine(TokenCounts):
    """Usage that was billed at one price."""

    model: str
    adapter: str | None = None
    plan: str | None = None
    rate: UsagePrices
    unknown_cached: UnknownCached
    lists: tuple[str, ...]
    """Names of the price lists that contain this price."""
    unpriced_units: tuple[PricedUnit, ...] = ()
    """Units of this line that the price list has no price for. They are not part of `amount`."""
    exact: str
    amount: str


class UnpricedLine(TokenCounts):
    """Usage that no price list has a price for. It is not part of any total."""

    model: str
    adapter: str | None = None
    plan: str | None = None


class CreditEntry(Message):
    """One credit of a tenant."""

    id: str
    tenant: str
    month: str
    amount: str
    """A positive amount is in the tenant's favour."""
    currency: str
    note: str
    made_at: str
    made_by: str


class Credits(Message):
    """Answer to `GET /v1/credits`."""

    credits: tuple[CreditEntry, ...] = ()


class NewCredit(Message):
    """Body of `POST /v1/credits`. Repeating a request with the same id and the same content has no effect."""

    id: Annotated[str, _WITHOUT_NUL] = Field(min_length=1, max_length=128)
    tenant: Annotated[str, _WITHOUT_NUL] = Field(min_length=1, max_length=253)
    month: str
    amount: str
    currency: str | None = None
    """Default: the currency of the price lists."""
    note: Annotated[str, _WITHOUT_NUL] = Field("", max_length=1000)
    made_by: Annotated[str, _WITHOUT_NUL] = Field("", max_length=253)


class BillStatement(Message):
    """Answer to `GET /v1/bill`."""

    tenant: str
    month: str
    external_ids: tuple[str, ...] = Field((), validation_alias="externalIDs", serialization_alias="externalIDs")
    currency: str | None = None
    """None: there is no price list."""
    lines: tuple[BillLine, ...] = ()
    unpriced: tuple[UnpricedLine, ...] = ()
    credits: tuple[CreditEntry, ...] = ()
    foreign_credits: tuple[CreditEntry, ...] = ()
    """Credits in another currency. They are not deducted."""
    usage: str | None = None
    """The sum of the lines."""
    credit: str | None = None
    """The sum of the credits."""
    total: str | None = None
    """Amount due; a negative amount is owed to the tenant."""
    month_ended: bool = False
    open_requests: int = 0
    """Requests of this month that have not ended. They are not billed yet."""
    known: bool = True
    """False: the ledger has never had usage or a credit of this tenant."""
    refused: tuple[str, ...] = ()
    """Mistakes in the price lists of the ledger's folder, as file:line: sentence. The lists are refused, and those
    accepted before them stay in force. Empty: the lists in the folder are in force."""


class PriceText(Message):
    """A price list in the body of a request."""

    file: str = Field(max_length=253)
    text: str


class RepriceRequest(Message):
    """Body of `POST /v1/bill`: computes the bill of a month with other price lists."""

    tenant: Annotated[str, _WITHOUT_NUL] = Field(min_length=1, max_length=253)
    month: str
    prices: tuple[PriceText, ...] = Field(min_length=1, max_length=64)
    """A single price list applies to the whole month. Several price lists apply from their effective dates on."""


class RepriceAnswer(Message):
    """Answer to `POST /v1/bill`; nothing is stored."""

    bill: BillStatement
    """The bill with the price lists in force."""
    other: BillStatement
    """The bill with the price lists of the request."""
    difference: str | None = None
    """Total of `other` minus total of `bill`; None when the currencies differ or a total is missing."""


class MarginRow(Message):
    """Revenue and cost of one combination of the dimensions in `by`."""

    gpu_class: str | None = Field(None, validation_alias="class", serialization_alias="class")
    """None: requests whose engine is unknown."""
    model: str | None = None
    day: str | None = None
    month: str | None = None
    tokens: int = 0
    """Billed input and output tokens."""
    unpriced_tokens: int = 0
    """Part of `tokens` that has no price and is missing from `revenue`."""
    audio_ms: int = 0
    """Length of billed audio in milliseconds."""
    unpriced_audio_ms: int = 0
    """Part of `audioMs` that has no price and is missing from `revenue`."""
    revenue: str | None = None
    """Exact, before credits; None: none of the usage has a price."""
    gpu_hours: float | None = None
    """Hours for which GPUs were held; None: unknown."""
    unpriced_gpu_hours: float = 0.0
    """Part of `gpuHours` on GPU classes without a price. It is missing from `cost`."""
    cost: str | None = None
    """Exact; None: unknown."""
    cost_currency: str | None = None
    margin: str | None = None
    """Revenue minus cost; None when one of the two is unknown or their currencies differ."""
    margin_percent: str | None = None
    """Margin as a percentage of the revenue."""


class Margin(Message):
    """Answer to `GET /v1/margin`."""

    start: str = Field(validation_alias="from", serialization_alias="from")
    end: str = Field(validation_alias="to", serialization_alias="to")
    by: tuple[Literal["class", "model", "day", "month"], ...] = ()
    currency: str | None = None
    """Currency of the revenue."""
    rows: tuple[MarginRow, ...] = ()
    refused: tuple[str, ...] = ()
    """As `refused` of a bill."""


class PricesInForce(Message):
    """Answer to `GET /v1/prices`."""

    lists: tuple[str, ...] = ()
    """Names of the price lists that were accepted, the earliest first."""
    current: str | None = None
    """The one in force now; None: nothing has a price now."""
    currency: str | None = None
    refused: tuple[str, ...] = ()
    """As `refused` of a bill."""
