"""The totals as the tables have them: by tenant and month, and by tenant and gateway, at the prices of their hours.

Prices change a few times a year, so sums are asked for by the stretch of time in which one list was in force, not by
the hour.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, Protocol

from sqlalchemy import Connection, Table, func, select

from shoal.api.ledger import Prices
from shoal.core.rating.price import Book, cost
from shoal.ledger import schema
from shoal.ledger.sums import HOUR_MS

_EVER: Final = 1 << 62
_NUMBERS: Final = ("requests", "input_tokens", "cached_tokens", "unknown_cached_input", "output_tokens")


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
class Total:
    """Of a tenant in a month."""

    requests: int = 0
    tokens: int = 0
    spent: int = 0


@dataclass(slots=True)
class Known:
    """What the tables say, summed up."""

    months: dict[str, dict[str, Total]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(Total)))
    gateways: dict[str, dict[str, Total]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(Total)))
    """Tenant, then boot id: since the gateway's start."""
    heard: dict[str, int] = field(default_factory=dict[str, int])
    """Boot id: when it was heard last, in ms since 1970."""


class Rated:
    """Rates sums at the prices of their hour."""

    def __init__(self, prices: PriceSource) -> None:
        self._prices = prices
        self._books: dict[int, tuple[Prices, Book]] = {}

    def cost(self, hour: int, plan: str, model: str, adapter: str, sums: tuple[int, int, int, int]) -> int:
        """`sums`: input, cached, input of unknown cached, output. 0 where there is no price."""
        prices = self._prices.at(hour)
        if prices is None:
            return 0
        known = self._books.get(id(prices))
        if known is None or known[0] is not prices:
            known = self._books[id(prices)] = (prices, Book.of(prices))
        book = known[1]
        rate = book.find(plan or None, model, adapter or None)
        if rate is None:
            return 0
        given, cached, unknown, output = sums
        return cost(rate, given, cached, output, unknown, unknown_cached=book.unknown_cached)


def read(connection: Connection, prices: PriceSource, now: float) -> Known:
    """What the tables say now, of this month and of those gateways that they still know. `now` in s since 1970."""
    known, rated = Known(), Rated(prices)
    hours, gateways = schema.hours, schema.gateway_hours
    for stretch in _stretches(connection, hours, prices, month_start(now)):
        where = (hours.c.billed, hours.c.hour >= stretch.begins, hours.c.hour < stretch.ends)
        by = (hours.c.tenant, hours.c.plan, hours.c.model, hours.c.adapter)
        sums = (func.sum(hours.c[name]) for name in _NUMBERS)
        for row in connection.execute(select(*by, *sums).where(*where).group_by(*by)):
            found: tuple[Any, ...] = tuple(row)
            total = known.months[month_of(stretch.begins / 1000)][found[0]]
            _add(total, rated, stretch.begins, found[1:4], found[4:])
    for stretch in _stretches(connection, gateways, prices, 0):
        where = (gateways.c.hour >= stretch.begins, gateways.c.hour < stretch.ends)
        by = (gateways.c.tenant, gateways.c.gateway, gateways.c.plan, gateways.c.model, gateways.c.adapter)
        sums = (func.sum(gateways.c[name]) for name in _NUMBERS)
        heard = func.max(gateways.c.heard_at)
        for row in connection.execute(select(*by, *sums, heard).where(*where).group_by(*by)):
            found = tuple(row)
            tenant, boot = found[:2]
            known.heard[boot] = max(known.heard.get(boot, 0), found[-1])
            _add(known.gateways[tenant][boot], rated, stretch.begins, found[2:5], found[5:-1])
    credits = schema.credits.c
    taken = select(credits.tenant, credits.month, credits.currency, func.sum(credits.amount))
    current = prices.current()
    for tenant, month, currency, amount in connection.execute(
        taken.where(credits.month >= month_of(now)).group_by(credits.tenant, credits.month, credits.currency)
    ):
        if current is not None and currency == current.currency:
            known.months[month][tenant].spent -= int(amount)
    return known


def month_of(seconds: float) -> str:
    """The calendar month in UTC, such as 2026-11."""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m}"


def month_start(seconds: float) -> int:
    """Its first millisecond."""
    begins = datetime.fromtimestamp(seconds, UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return int(begins.timestamp()) * 1000


class _Stretch(NamedTuple):
    """Hours of one month in which one price list was in force; in ms since 1970."""

    begins: int
    ends: int


def _stretches(connection: Connection, table: Table, prices: PriceSource, since: int) -> Iterator[_Stretch]:
    hour = table.c.hour
    first, last = connection.execute(select(func.min(hour), func.max(hour)).where(hour >= since)).one()
    if first is None:
        return
    begins, before = first, None
    for at in range(first, last + HOUR_MS, HOUR_MS):
        # Lists are compared by identity: one that is read again is a new one, and cuts a stretch where none had to be.
        now = (month_of(at / 1000), id(prices.at(at)))
        if before is not None and now != before:
            yield _Stretch(begins, at)
            begins = at
        before = now
    yield _Stretch(begins, _EVER)


def _add(total: Total, rated: Rated, hour: int, key: Sequence[str], numbers: Sequence[Any]) -> None:
    plan, model, adapter = key
    # PostgreSQL sums whole numbers into a decimal.
    requests, given, cached, unknown, output = map(int, numbers)
    total.requests += requests
    total.tokens += given + output
    total.spent += rated.cost(hour, plan, model, adapter, (given, cached, unknown, output))
