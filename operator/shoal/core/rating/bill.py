"""A tenant's bill for a month.

Exact up to one rounding: the amount of a line is counts times prices, in whole 10^-12 of the currency; each line is
rounded to the smallest unit of the currency (half up), and the total is the sum of the rounded lines. The same records
and price lists give the same bill, whenever, in whatever order and in however many parts it is computed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Final

from shoal.api.ledger import Rate, UnknownCached
from shoal.core.rating import money
from shoal.core.rating.price import cost, unpriced
from shoal.core.rating.schedule import InForce, Schedule
from shoal.core.rating.units import UNITS, Unit


@dataclass(frozen=True, slots=True)
class BilledCounts:
    """Sums of billed usage. `input` includes `cached` and `unknown_cached_input`, `output` includes `reasoning`."""

    requests: int = 0
    input: int = 0
    cached: int = 0
    unknown_cached_input: int = 0
    """Of `input`: input of requests that do not report how much of it was cached."""
    output: int = 0
    reasoning: int = 0
    unknown_requests: int = 0
    """Requests that reached an engine and whose usage is unknown."""
    documents: int = 0
    images: int = 0
    audio_ms: int = 0
    image_tokens: int = 0
    """Of `input`, as the following; only as far as engines tell."""
    audio_tokens: int = 0
    accepted: int = 0
    """Of `output`: tokens of drafts."""

    def __add__(self, other: "BilledCounts") -> "BilledCounts":
        return BilledCounts(*(a + b for a, b in zip(_all_counts(self), _all_counts(other), strict=True)))

    @property
    def tokens(self) -> int:
        return self.input + self.output

    @property
    def used(self) -> bool:
        """Whether there is anything that a price applies to."""
        return bool(self.tokens or self.documents or self.images or self.audio_ms)


_all_counts: Final = attrgetter(*(one.name for one in fields(BilledCounts)))


@dataclass(frozen=True, slots=True)
class Usage:
    """Use of one model or adapter from `start` on, in a time with one price list."""

    start: int
    """Milliseconds since 1970."""
    plan: str | None
    model: str
    adapter: str | None
    counts: BilledCounts
    external_id: str | None = None
    gpu_class: str | None = None


@dataclass(frozen=True, slots=True)
class Credit:
    """A separate entry: records and prices are never changed."""

    id: str
    amount: int
    """10^-12 of the currency; positive is in the tenant's favour."""
    currency: str
    note: str


@dataclass(frozen=True, slots=True)
class RatedLine:
    """Usage at one price."""

    model: str
    adapter: str | None
    plan: str | None
    rate: Rate
    unknown_cached: UnknownCached
    lists: tuple[str, ...]
    """The price lists with this price."""
    counts: BilledCounts
    amount: int
    """Exact, in 10^-12 of the currency."""
    cents: int
    """The billed amount, in the smallest units of the currency."""
    unpriced_units: tuple[Unit, ...] = ()
    """Units of this usage that the price list has no price for: `amount` does not contain them."""


@dataclass(frozen=True, slots=True)
class Unpriced:
    """Usage without a price in the price list in force. It is on no line and in no total."""

    model: str
    adapter: str | None
    plan: str | None
    counts: BilledCounts


@dataclass(frozen=True, slots=True)
class Bill:
    """A bill. `currency` None: no price list is in force in this month, so all usage is unpriced."""

    tenant: str
    month: str
    currency: str | None
    lines: tuple[RatedLine, ...] = ()
    unpriced: tuple[Unpriced, ...] = ()
    credits: tuple[Credit, ...] = ()
    foreign_credits: tuple[Credit, ...] = ()
    """In another currency than the prices, so not deducted."""
    external_ids: tuple[str, ...] = ()

    @property
    def usage_cents(self) -> int:
        """The sum of the lines."""
        return sum(line.cents for line in self.lines)

    @property
    def credit_cents(self) -> int:
        """The sum of the credits."""
        return 0 if self.currency is None else sum(money.cents(one.amount, self.currency) for one in self.credits)

    @property
    def total_cents(self) -> int:
        """The amount to be paid; negative: in the tenant's favour."""
        return self.usage_cents - self.credit_cents

    @property
    def exact(self) -> int:
        """The lines before their rounding, in 10^-12 of the currency."""
        return sum(line.amount for line in self.lines)


_Key = tuple[str, str, str, tuple[int, ...], UnknownCached]
"""Model, adapter, plan, prices."""


def _prices(rate: Rate) -> tuple[int, ...]:
    """All prices, in an order that can be sorted: no price precedes a price of 0."""
    units = (getattr(rate, unit.count) for unit in UNITS)
    return (rate.input, rate.cached, rate.output, *(-1 if price is None else price for price in units))


@dataclass(slots=True)
class _Sum:
    rate: Rate
    counts: BilledCounts = field(default_factory=BilledCounts)
    lists: set[str] = field(default_factory=set[str])


def rated(usage: Usage, schedule: Schedule) -> tuple[InForce, Rate] | None:
    """The list and the price that apply; None: the usage is unpriced."""
    in_force = schedule.at(usage.start)
    rate = None if in_force is None else in_force.book.find(usage.plan, usage.model, usage.adapter)
    return None if in_force is None or rate is None else (in_force, rate)


def amount(counts: BilledCounts, rate: Rate, unknown_cached: UnknownCached) -> int:
    """Exact, in 10^-12 of the currency."""
    return cost(
        rate,
        counts.input,
        counts.cached,
        counts.output,
        counts.unknown_cached_input,
        documents=counts.documents,
        images=counts.images,
        audio_ms=counts.audio_ms,
        unknown_cached=unknown_cached,
    )


def bill(tenant: str, month: str, usage: Iterable[Usage], schedule: Schedule, credits: Iterable[Credit] = ()) -> Bill:
    """The bill for the tenant's usage of a month, which may come in any order and in any parts."""
    sums: dict[_Key, _Sum] = {}
    without: dict[tuple[str, str, str], BilledCounts] = {}
    external_ids: set[str] = set()
    for one in usage:
        if one.external_id is not None:
            external_ids.add(one.external_id)
        what = (one.model, one.adapter or "", one.plan or "")
        if (found := rated(one, schedule)) is None:
            without[what] = without.get(what, BilledCounts()) + one.counts
            continue
        in_force, rate = found
        # Keyed by the price, not the list: a new list with an unchanged price makes no second line.
        key = (*what, _prices(rate), in_force.prices.unknown_cached)
        total = sums.setdefault(key, _Sum(rate))
        total.counts += one.counts
        total.lists.add(in_force.prices.list)
    currency = schedule.currency
    ordered = sorted(credits, key=lambda one: one.id)
    return Bill(
        tenant=tenant,
        month=month,
        currency=currency,
        lines=tuple(_line(key, sums[key], currency or "") for key in sorted(sums)),
        unpriced=tuple(
            Unpriced(model, adapter or None, plan or None, counts)
            for (model, adapter, plan), counts in sorted(without.items())
            # Requests that reached no engine are free at any price.
            if counts.used or counts.unknown_requests
        ),
        credits=tuple(one for one in ordered if one.currency == currency),
        foreign_credits=tuple(one for one in ordered if one.currency != currency),
        external_ids=tuple(sorted(external_ids)),
    )


def _line(key: _Key, total: _Sum, currency: str) -> RatedLine:
    exact = amount(total.counts, total.rate, key[4])
    return RatedLine(
        model=key[0],
        adapter=key[1] or None,
        plan=key[2] or None,
        rate=total.rate,
        unknown_cached=key[4],
        lists=tuple(sorted(total.lists)),
        counts=total.counts,
        amount=exact,
        cents=money.cents(exact, currency),
        unpriced_units=unpriced(total.rate, total.counts),
    )
