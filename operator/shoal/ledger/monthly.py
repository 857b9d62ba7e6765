"""The totals as the tables have them: by tenant and month, and by tenant and gateway, at the prices of their hours.

Prices change a few times a year, so sums are asked for by the stretch of time in which one list was in force, not by
the hour.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

from sqlalchemy import Connection, func, select

from shoal.api.ledger import Prices
from shoal.core.rating.price import RateTable, cost
from shoal.ledger import schema
from shoal.ledger.sums import HOUR_MS, HourKey, HourlySums


class PriceSource(Protocol):
    """The part of `prices.PriceLists` that is needed here."""

    def current(self) -> Prices | None:
        """The list in force."""
        ...

    def at(self, moment: int) -> Prices | None:
        """The list in force then, in ms since 1970; the same object as long as it is the same list."""
        ...


class NoPrices:
    """Where no price list is set: nothing costs anything."""

    def current(self) -> Prices | None:
        return None

    def at(self, moment: int) -> Prices | None:
        del moment
        return None


@dataclass(slots=True)
class MonthlyTotal:
    """Of a tenant in a month."""

    requests: int = 0
    tokens: int = 0
    spent: int = 0


@dataclass(slots=True)
class Known:
    """What the tables say, summed up."""

    months: dict[str, dict[str, MonthlyTotal]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(MonthlyTotal))
    )
    gateways: dict[str, dict[str, MonthlyTotal]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(MonthlyTotal))
    )
    """Tenant, then boot id: since the gateway's start."""
    last_report: dict[str, int] = field(default_factory=dict[str, int])
    """Boot id: when it was heard last, in ms since 1970."""


class Rated:
    """Rates sums at the prices of their hour."""

    def __init__(self, prices: PriceSource) -> None:
        self._prices = prices
        self._books: dict[int, tuple[Prices, RateTable]] = {}

    def cost(self, key: HourKey, sums: HourlySums) -> int:
        """0 where there is no price."""
        prices = self._prices.at(key.hour)
        if prices is None:
            return 0
        known = self._books.get(id(prices))
        if known is None or known[0] is not prices:
            known = self._books[id(prices)] = (prices, RateTable.of(prices))
        book = known[1]
        rate = book.find(key.plan or None, key.model, key.adapter or None)
        if rate is None:
            return 0
        return cost(
            rate,
            sums.input_tokens,
            sums.cached_tokens,
            sums.output_tokens,
            sums.unknown_cached_input,
            unknown_cached=book.unknown_cached,
        )


def read(connection: Connection, prices: PriceSource, now: float) -> Known:
    """What the tables say now, of this month on and of those gateways that they still know. `now` in s since 1970."""
    known, rated = Known(), Rated(prices)
    hours = schema.hours.c
    by = (hours.tenant, hours.plan, hours.model, hours.adapter)
    numbers = [func.sum(schema.hours.c[name]) for name in HourlySums._fields]
    for begins, ends in _stretches(connection, prices, month_start(now)):
        where = (hours.billed, hours.hour >= begins, hours.hour < ends)
        month = known.months[month_of(begins / 1000)]
        for row in connection.execute(select(*by, *numbers).where(*where).group_by(*by)):
            found: tuple[Any, ...] = tuple(row)
            tenant, plan, model, adapter = found[:4]
            sums = HourlySums(*map(int, found[4:]))  # PostgreSQL sums whole numbers into a decimal
            total = month[tenant]
            total.requests += sums.requests
            total.tokens += sums.input_tokens + sums.output_tokens
            total.spent += rated.cost(HourKey(begins, tenant, "", "", plan, model, adapter, "", True), sums)
    for row in connection.execute(select(schema.gateways)):
        known.gateways[row.tenant][row.gateway] = MonthlyTotal(row.requests, row.tokens, row.spent)
        known.last_report[row.gateway] = max(known.last_report.get(row.gateway, 0), row.heard_at)
    credits = schema.credits.c
    current = prices.current()
    # Summed here: SQLite's own sum of whole numbers ends with an error where it leaves 64 bits.
    for row in connection.execute(select(schema.credits).where(credits.month >= month_of(now))):
        if current is not None and row.currency == current.currency:
            known.months[row.month][row.tenant].spent -= row.amount
    return known


def month_of(seconds: float) -> str:
    """The calendar month in UTC, such as 2026-11."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m}"


def month_start(seconds: float) -> int:
    """Its first millisecond."""
    begins = datetime.fromtimestamp(seconds, UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return int(begins.timestamp()) * 1000


def _stretches(connection: Connection, prices: PriceSource, since: int) -> Iterator[tuple[int, int]]:
    """Times of one month in which one price list was in force: its first hour, and the first after it."""
    hour = schema.hours.c.hour
    first, last = connection.execute(select(func.min(hour), func.max(hour)).where(hour >= since)).one()
    if first is None:
        return
    begins, before = first, None
    for at in range(first, last + HOUR_MS, HOUR_MS):
        # Lists are compared by identity: one that is read again is a new one, and cuts a stretch where none had to be.
        now = (month_of(at / 1000), id(prices.at(at)))
        if before is not None and now != before:
            yield begins, at
            begins = at
        before = now
    yield begins, last + HOUR_MS
