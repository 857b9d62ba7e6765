"""What the ledger answers to questions on usage and money (docs/billing.md).

Amounts are decimal texts: `amount` and its kind are rounded to the smallest unit of the currency, `exact` are not.
Prices are per million tokens. In a row a field that was not asked for is absent, and null is "none": an `adapter` of
null is the model without one.
"""

from typing import Literal

from pydantic import Field

from shoal.api.ledger import UnknownCached
from shoal.api.replica import Message

By = Literal["tenant", "key", "externalID", "model", "adapter", "class", "plan", "hour", "day", "month"]


class TokenCounts(Message):
    """Sums over requests."""

    requests: int = 0
    input_tokens: int = 0
    """Cached ones included."""
    cached_tokens: int = 0
    unknown_cached_input_tokens: int = 0
    """Of the input: that of requests that do not say how much was cached."""
    output_tokens: int = 0
    """Reasoning included."""
    reasoning_tokens: int = 0
    unknown_requests: int = 0
    """Requests that an engine had and whose tokens nobody knows."""


class UsageRow(TokenCounts):
    """Of one combination of what was asked for with `by`."""

    tenant: str | None = None
    key: str | None = None
    external_id: str | None = Field(None, validation_alias="externalID", serialization_alias="externalID")
    model: str | None = None
    adapter: str | None = None
    gpu_class: str | None = Field(None, validation_alias="class", serialization_alias="class")
    plan: str | None = None
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
    """There is more: ask again with `after` set to this."""
    unseen: tuple[str, ...] = ()
    """Tenants that were asked for and of which there is no usage at any time."""


class RateFigures(Message):
    """Prices of a million tokens."""

    input: str
    cached: str
    output: str


class BillLine(TokenCounts):
    """What one price was paid for."""

    model: str
    adapter: str | None = None
    plan: str | None = None
    rate: RateFigures
    unknown_cached: UnknownCached
    lists: tuple[str, ...]
    """The price lists that say so."""
    exact: str
    amount: str


class UnpricedLine(TokenCounts):
    """Usage for which no price list has a price. It is in no total."""

    model: str
    adapter: str | None = None
    plan: str | None = None


class CreditEntry(Message):
    """A credit."""

    id: str
    tenant: str
    month: str
    amount: str
    """Positive is for the tenant."""
    currency: str
    note: str
    made_at: str
    made_by: str


class Credits(Message):
    """Answer to `GET /v1/credits`."""

    credits: tuple[CreditEntry, ...] = ()


class NewCredit(Message):
    """`POST /v1/credits`. The same id again with the same content makes no second one."""

    id: str = Field(min_length=1, max_length=128)
    tenant: str = Field(min_length=1, max_length=253)
    month: str
    amount: str
    currency: str | None = None
    """Default: that of the price lists."""
    note: str = Field("", max_length=1000)
    made_by: str = Field("", max_length=253)


class BillStatement(Message):
    """Answer to `GET /v1/bill`."""

    tenant: str
    month: str
    external_ids: tuple[str, ...] = Field((), validation_alias="externalIDs", serialization_alias="externalIDs")
    currency: str | None = None
    """None: no price list."""
    lines: tuple[BillLine, ...] = ()
    unpriced: tuple[UnpricedLine, ...] = ()
    credits: tuple[CreditEntry, ...] = ()
    foreign_credits: tuple[CreditEntry, ...] = ()
    """In another currency: not taken off."""
    usage: str | None = None
    """The sum of the lines."""
    credit: str | None = None
    """The sum of the credits."""
    total: str | None = None
    """What is to be paid; below zero it is the tenant's."""
    month_ended: bool = False
    open_requests: int = 0
    """Of this month, that have not ended: they are not on it yet."""
    known: bool = True
    """False: the ledger has never seen usage or a credit of this tenant."""


class PriceText(Message):
    """A price list that is sent along."""

    file: str = Field(max_length=253)
    text: str


class RateAgain(Message):
    """`POST /v1/bill`: the bill of a month as other price lists would have made it."""

    tenant: str = Field(min_length=1, max_length=253)
    month: str
    prices: tuple[PriceText, ...] = Field(min_length=1, max_length=64)
    """A single one counts for the whole month, several each from its own moment on."""


class RatedAgain(Message):
    """Answer to it; nothing is kept."""

    bill: BillStatement
    """With the price lists in force."""
    other: BillStatement
    """With those that were sent."""
    difference: str | None = None
    """Total of `other` minus that of `bill`; None where their currencies differ or one has none."""


class MarginRow(Message):
    """Of one combination of what was asked for with `by`."""

    gpu_class: str | None = Field(None, validation_alias="class", serialization_alias="class")
    """None: requests of which no engine is known."""
    model: str | None = None
    day: str | None = None
    month: str | None = None
    tokens: int = 0
    """Billed: input and output."""
    unpriced_tokens: int = 0
    """Of these, those without a price: they are not in the revenue."""
    revenue: str | None = None
    """Exact, credits not taken off; None: nothing of it has a price."""
    gpu_hours: float | None = None
    """For which GPUs were held; None: not known."""
    unpriced_gpu_hours: float = 0.0
    """Of these, those of a class without a price: they are not in the cost."""
    cost: str | None = None
    """Exact; None: not known."""
    cost_currency: str | None = None
    margin: str | None = None
    """Revenue minus cost; None where one of them is not known, or they have different currencies."""
    margin_percent: str | None = None
    """Of the revenue."""


class Margin(Message):
    """Answer to `GET /v1/margin`."""

    start: str = Field(validation_alias="from", serialization_alias="from")
    end: str = Field(validation_alias="to", serialization_alias="to")
    by: tuple[Literal["class", "model", "day", "month"], ...] = ()
    currency: str | None = None
    """Of the revenue."""
    rows: tuple[MarginRow, ...] = ()
