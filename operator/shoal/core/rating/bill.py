"""A tenant's bill for a month.

Exact up to one rounding: the amount of a line is tokens times prices, in whole 10^-12 of the currency; each line is
rounded to the smallest unit of the currency (half up), and the total is the sum of what the lines show. So the same
records and price lists make the same bill whenever, in whatever order and in however many parts it is computed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from shoal.api.ledger import Rate, UnknownCached
from shoal.core.rating import money
from shoal.core.rating.price import cost
from shoal.core.rating.schedule import InForce, Schedule


@dataclass(frozen=True, slots=True)
class BilledCounts:
    """Sums of billed usage. `input` includes `cached` and `unknown_cached_input`, `output` includes `reasoning`."""

    requests: int = 0
    input: int = 0
    cached: int = 0
    unknown_cached_input: int = 0
    """Of `input`: that of requests that do not say how much was cached."""
    output: int = 0
    reasoning: int = 0
    unknown_requests: int = 0
    """Requests that an engine had and whose tokens nobody knows."""

    def __add__(self, other: "BilledCounts") -> "BilledCounts":
        return BilledCounts(
            self.requests + other.requests,
            self.input + other.input,
            self.cached + other.cached,
            self.unknown_cached_input + other.unknown_cached_input,
            self.output + other.output,
            self.reasoning + other.reasoning,
            self.unknown_requests + other.unknown_requests,
        )

    @property
    def tokens(self) -> int:
        return self.input + self.output


@dataclass(frozen=True, slots=True)
class Usage:
    """What of one thing was used from `start` on, in a time in which one price list counts."""

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
    """An entry of its own; no record and no price is ever changed."""

    id: str
    amount: int
    """10^-12 of the currency; positive is for the tenant."""
    currency: str
    note: str


@dataclass(frozen=True, slots=True)
class RatedLine:
    """What one price was paid for."""

    model: str
    adapter: str | None
    plan: str | None
    rate: Rate
    unknown_cached: UnknownCached
    lists: tuple[str, ...]
    """The price lists that say so."""
    counts: BilledCounts
    amount: int
    """Exact, in 10^-12 of the currency."""
    cents: int
    """What is billed, in the smallest units of the currency."""


@dataclass(frozen=True, slots=True)
class Unpriced:
    """Usage for which no price list in force had a price. It is on no line and in no total."""

    model: str
    adapter: str | None
    plan: str | None
    counts: BilledCounts


@dataclass(frozen=True, slots=True)
class Bill:
    """`currency` None: no price list counts in this month, so everything is unpriced."""

    tenant: str
    month: str
    currency: str | None
    lines: tuple[RatedLine, ...] = ()
    unpriced: tuple[Unpriced, ...] = ()
    credits: tuple[Credit, ...] = ()
    foreign_credits: tuple[Credit, ...] = ()
    """In another currency than the prices: taken off nothing."""
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
        """What is to be paid; below zero it is the tenant's."""
        return self.usage_cents - self.credit_cents

    @property
    def exact(self) -> int:
        """The lines before their rounding, in 10^-12 of the currency."""
        return sum(line.amount for line in self.lines)


@dataclass(slots=True)
class _Sum:
    rate: Rate
    counts: BilledCounts = field(default_factory=BilledCounts)
    lists: set[str] = field(default_factory=set[str])


def rated(usage: Usage, schedule: Schedule) -> tuple[InForce, Rate] | None:
    """The list and the price that count for it; None: it is unpriced."""
    in_force = schedule.at(usage.start)
    rate = None if in_force is None else in_force.book.find(usage.plan, usage.model, usage.adapter)
    return None if in_force is None or rate is None else (in_force, rate)


def amount(counts: BilledCounts, rate: Rate, unknown_cached: UnknownCached) -> int:
    """Exact, in 10^-12 of the currency."""
    return cost(
        rate, counts.input, counts.cached, counts.output, counts.unknown_cached_input, unknown_cached=unknown_cached
    )


def bill(tenant: str, month: str, usage: Iterable[Usage], schedule: Schedule, credits: Iterable[Credit] = ()) -> Bill:
    """The bill for what the tenant used in the month; `usage` may come in any order and in any parts."""
    sums: dict[tuple[str, str, str, int, int, int, UnknownCached], _Sum] = {}
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
        # By the figures and not by the list: a new list that leaves a price as it was makes no second line.
        key = (*what, rate.input, rate.cached, rate.output, in_force.prices.unknown_cached)
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
            # What no engine had costs nothing at any price.
            if counts.tokens or counts.unknown_requests
        ),
        credits=tuple(one for one in ordered if one.currency == currency),
        foreign_credits=tuple(one for one in ordered if one.currency != currency),
        external_ids=tuple(sorted(external_ids)),
    )


def _line(key: tuple[str, str, str, int, int, int, UnknownCached], total: _Sum, currency: str) -> RatedLine:
    exact = amount(total.counts, total.rate, key[6])
    return RatedLine(
        model=key[0],
        adapter=key[1] or None,
        plan=key[2] or None,
        rate=total.rate,
        unknown_cached=key[6],
        lists=tuple(sorted(total.lists)),
        counts=total.counts,
        amount=exact,
        cents=money.cents(exact, currency),
    )
