"""`GET /v1/totals`: the usage of all tenants in the current month, kept in memory and streamed.

The totals are the sums of `hours` and `gateways`. They are read once after the database is opened, and then updated
with the differences of each commit, in commit order. Gateways correct their own counters with the totals, and changes
are sent within a second. A gateway's boot id stays in the totals while it has an open stream or sends records.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final

import orjson
import structlog

from shoal.api.ledger import Counted, Prices, TenantTotal
from shoal.ledger.bulk import MOST
from shoal.ledger.monthly import Known, MonthlyTotal, NoPrices, PriceSource, Rated, month_of, read
from shoal.ledger.store import DatabaseUnavailable, LedgerStore
from shoal.ledger.sums import Changes
from shoal.net.hub import StreamHub

log = structlog.get_logger()

PUBLISH_SECONDS: Final = 0.2
"""Interval between messages."""
RETAIN_SECONDS: Final = 86_400.0
"""How long a gateway without a stream stays in the totals after its last message: other gateways may still have a
stream from it."""

_LONGEST: Final = 300
"""Characters of `pricesRefused`."""


class TenantTotals:
    """Totals of all tenants; create it in the event loop. `clock` (seconds since 1970) determines the month, in UTC."""

    def __init__(
        self,
        store: LedgerStore,
        prices: PriceSource | None = None,
        clock: Callable[[], float] = time.time,
        refused: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        """`refused`: why price lists are refused, one text per mistake."""
        self._store = store
        self._refused = refused
        self._published_refused: tuple[str, ...] = ()
        self.prices: PriceSource = prices or NoPrices()
        self._clock = clock
        self.hub: Final = StreamHub("", self._full)
        self._known: Known | None = None
        self._rated = Rated(self.prices)
        self._month = month_of(clock())
        self._published_prices: Prices | None = None
        self._dirty: set[str] = set()
        self._wake = asyncio.Event()
        self._reload = False

    @property
    def known(self) -> bool:
        """Whether the tables have been read; before that the totals are unknown."""
        return self._known is not None

    def reload(self) -> None:
        """Schedules a read of the tables: the database was opened, credits were added, or prices have changed."""
        self._reload = True
        self._wake.set()

    def add(self, changes: Changes) -> None:
        """Applies the changes of a commit."""
        known = self._known
        if known is None:
            return  # they are read after this commit
        now = round(self._clock() * 1000)
        for boot in changes.gateways_seen:
            known.last_report[boot] = now
        for key, sums in changes.hours.items():
            if key.billed:
                total = known.months[month_of(key.hour / 1000)][key.tenant]
                total.requests += sums.requests
                total.tokens += sums.input_tokens + sums.output_tokens
                total.spent += self._rated.cost(key, sums)
                self._dirty.add(key.tenant)
        for at, own in changes.gateways.items():
            total = known.gateways[at.tenant][at.gateway]
            total.requests += own.requests
            total.tokens += own.tokens
            total.spent += own.spent
            self._dirty.add(at.tenant)
        if self._dirty:
            self._wake.set()

    async def run(self) -> None:
        """Reads the tables when needed and publishes changes, until cancelled."""
        while True:
            try:
                async with asyncio.timeout(1.0):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            if self.prices.current() is not self._published_prices:
                self._reload = True
            if self._reload and self._store.error is None:
                self._reload = False
                try:
                    await self.read()
                except DatabaseUnavailable as error:
                    log.warning("the totals could not be read", error=str(error))
                    self._reload = True
            self.publish()
            await asyncio.sleep(PUBLISH_SECONDS)

    async def read(self) -> None:
        """Reads the tables, in commit order.

        Raises:
            DatabaseUnavailable: the database is unavailable.
        """
        self._published_prices = self.prices.current()
        self._rated = Rated(self.prices)
        now = self._clock()
        await self._store.write(
            lambda connection: read(connection, self.prices, now), lambda known: self._install(known, month_of(now))
        )

    def publish(self) -> None:
        """Publishes changes since the last call; everything when a new month has begun. When the clock was set back
        into an earlier month, the tables are read again: its totals were dropped when it ended."""
        if self._known is None:
            return
        if (refused := self._refused()) != self._published_refused:
            self._published_refused = refused
            self.hub.restate()
        month = month_of(self._clock())
        if month < self._month:
            self.reload()
        elif month != self._month:
            log.info("a new month begins", month=month)
            for old in [each for each in self._known.months if each < month]:
                del self._known.months[old]
            self._month = month
            self._dirty.clear()
            self.hub.restate()
        elif self._dirty:
            tenants = {tenant: self._total(tenant) for tenant in self._dirty}
            self._dirty.clear()
            self.hub.publish(orjson.dumps({"tenants": tenants}))

    def close(self) -> None:
        """Ends every stream."""
        self.hub.close()

    def total(self, tenant: str) -> TenantTotal | None:
        """Total of the current month; None: the tables were not read yet."""
        return None if self._known is None else TenantTotal.model_validate(self._total(tenant))

    def _install(self, known: Known, month: str) -> None:
        self._known = known
        self._month = month
        self._dirty.clear()
        self.hub.restate()

    def _full(self) -> bytes:
        known = self._known
        if known is None:
            return b"{}"
        prices = self.prices.current()
        refused = "; ".join(self._refused())[:_LONGEST]
        tenants = {*known.months[self._month], *known.gateways}
        return orjson.dumps(
            {
                "month": self._month,
                "tenants": {tenant: self._total(tenant) for tenant in tenants},
                "prices": None if prices is None else prices.model_dump(mode="json", by_alias=True),
                "pricesRefused": refused or None,
            }
        )

    def _total(self, tenant: str) -> dict[str, object]:
        known = self._known
        assert known is not None  # noqa: S101 - callers have looked
        month = known.months[self._month]
        total = month.get(tenant, MonthlyTotal())
        boots = known.gateways.get(tenant, {})
        listening = {reader.caller.boot for reader in self.hub}
        oldest = round((self._clock() - RETAIN_SECONDS) * 1000)
        return {
            "requests": total.requests,
            "tokens": total.tokens,
            "spent": _bounded(total.spent),
            "gateways": {
                boot: Counted(tokens=each.tokens, spent=_bounded(each.spent)).model_dump()
                for boot, each in boots.items()
                if boot in listening or known.last_report.get(boot, 0) >= oldest
            },
        }


def _bounded(spent: int) -> int:
    """Limits an amount to 64 bits for JSON; no budget can be larger."""
    return max(-MOST, min(spent, MOST))
