"""Totals from the tables: by tenant and month, and by tenant and gateway, at the prices of their hours.

Prices change a few times a year, so sums are queried per period in which one price list was in force, not per hour.
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
    """The part of `prices.PriceFolder` that is needed here."""

    def current(self) -> Prices | None:
        """The price list in force now."""
        ...

    def at(self, moment: int) -> Prices | None:
        """The price list in force at a time in ms since 1970. The same list is always the same object."""
        ...


class NoPrices:
    """Used without price lists: everything costs nothing."""

    def current(self) -> Prices | None:
        return None

    def at(self, moment: int) -> Prices | None:
        del moment
        return None


@dataclass(slots=True)
class MonthlyTotal:
    """Usage of a tenant in a month."""

    requests: int = 0
    tokens: int = 0
    spent: int = 0


@dataclass(slots=True)
class Known:
    """Sums from the tables."""

    months: dict[str, dict[str, MonthlyTotal]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(MonthlyTotal))
    )
    gateways: dict[str, dict[str, MonthlyTotal]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(MonthlyTotal))
    )
    """Tenant -> boot id -> usage since the gateway's start."""
    last_report: dict[str, int] = field(default_factory=dict[str, int])
    """Boot id -> time of the last message, in ms since 1970."""


class Rated:
    """Computes the cost of sums at the prices of their hour."""

    def __init__(self, prices: PriceSource) -> None:
        self._prices = prices
        self._books: dict[int, tuple[Prices, RateTable]] = {}

    def cost(self, key: HourKey, sums: HourlySums) -> int:
        """Cost of the sums; 0 without a price."""
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
            documents=sums.documents,
            images=sums.images,
            audio_ms=sums.audio_ms,
            unknown_cached=book.unknown_cached,
        )


def read(connection: Connection, prices: PriceSource, now: float) -> Known:
    """Sums of the current month and later, and of the gateways in the tables. `now` in s since 1970."""
    known, rated = Known(), Rated(prices)
    hours = schema.hours.c
    by = (hours.tenant, hours.plan, hours.model, hours.adapter)
    numbers = [func.sum(schema.hours.c[name]) for name in HourlySums._fields]
    for begins, ends in _price_periods(connection, prices, month_start(now)):
        where = (hours.billed, hours.hour >= begins, hours.hour < ends)
        month = known.months[month_of(begins / 1000)]
        for row in connection.execute(select(*by, *numbers).where(*where).group_by(*by)):
            found: tuple[Any, ...] = tuple(row)
            tenant, plan, model, adapter = found[:4]
            sums = HourlySums(*map(int, found[4:]))  # PostgreSQL's sums of integers are decimals
            total = month[tenant]
            total.requests += sums.requests
            total.tokens += sums.input_tokens + sums.output_tokens
            total.spent += rated.cost(HourKey(begins, tenant, "", "", plan, model, adapter, "", True), sums)
    for row in connection.execute(select(schema.gateways)):
        known.gateways[row.tenant][row.gateway] = MonthlyTotal(row.requests, row.tokens, row.spent)
        known.last_report[row.gateway] = max(known.last_report.get(row.gateway, 0), row.heard_at)
    credits = schema.credits.c
    current = prices.current()
    # Summed here: SQLite's sum of integers fails when it exceeds 64 bits.
    for row in connection.execute(select(schema.credits).where(credits.month >= month_of(now))):
        if current is not None and row.currency == current.currency:
            known.months[row.month][row.tenant].spent -= row.amount
    return known


def month_of(seconds: float) -> str:
    """The calendar month in UTC, such as 2026-11."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m}"


def month_start(seconds: float) -> int:
    """First millisecond of the calendar month in UTC."""
    begins = datetime.fromtimestamp(seconds, UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return int(begins.timestamp()) * 1000


def _price_periods(connection: Connection, prices: PriceSource, since: int) -> Iterator[tuple[int, int]]:
    """Periods within one month in which one price list was in force: first hour, and first hour after it."""
    hour = schema.hours.c.hour
    first, last = connection.execute(select(func.min(hour), func.max(hour)).where(hour >= since)).one()
    if first is None:
        return
    begins, before = first, None
    for at in range(first, last + HOUR_MS, HOUR_MS):
        # Lists are compared by identity: a reloaded list is a new object, which only adds an unnecessary period.
        now = (month_of(at / 1000), id(prices.at(at)))
        if before is not None and now != before:
            yield begins, at
            begins = at
        before = now
    yield begins, last + HOUR_MS
