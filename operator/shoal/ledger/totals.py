"""`GET /v1/totals`: what every tenant used this month, kept in memory beside the tables and told as it changes.

The totals are the sums of `hours` and `gateways`, read once after the database was opened and then moved by the
differences of each commit, in the order of the commits. They correct the gateways' own counters, and are told within a
second; a gateway's open stream or its records keep its boot id among them.
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

TELL_SECONDS: Final = 0.2
"""Between two messages."""
REMEMBER_SECONDS: Final = 86_400.0
"""How long a gateway that was heard last is told, where it does not listen: the other gateways may still hear it."""


class TenantTotals:
    """Made in the event loop. `clock` gives seconds since 1970: the month turns by it, in UTC."""

    def __init__(
        self, store: LedgerStore, prices: PriceSource | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._store = store
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
        """Whether the tables were read: before that, there is nothing true to tell."""
        return self._known is not None

    def reload(self) -> None:
        """Has the tables read again: the database was opened, credits were made or prices have changed."""
        self._reload = True
        self._wake.set()

    def add(self, changes: Changes) -> None:
        """A commit changed the sums."""
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
        """For ever: reads the tables when needed, and tells what has changed."""
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
            await asyncio.sleep(TELL_SECONDS)

    async def read(self) -> None:
        """Reads the tables, in the order of the commits.

        Raises:
            Unavailable: the database is away.
        """
        self._published_prices = self.prices.current()
        self._rated = Rated(self.prices)
        now = self._clock()
        await self._store.write(lambda connection: read(connection, self.prices, now), self._install)

    def publish(self) -> None:
        """Tells what changed since it was last called; all, where the month has turned."""
        if self._known is None:
            return
        month = month_of(self._clock())
        if month != self._month:
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
        """Of this month; None while the tables were not read."""
        return None if self._known is None else TenantTotal.model_validate(self._total(tenant))

    def _install(self, known: Known) -> None:
        self._known = known
        self._month = month_of(self._clock())
        self._dirty.clear()
        self.hub.restate()

    def _full(self) -> bytes:
        known = self._known
        if known is None:
            return b"{}"
        prices = self.prices.current()
        tenants = {*known.months[self._month], *known.gateways}
        return orjson.dumps(
            {
                "month": self._month,
                "tenants": {tenant: self._total(tenant) for tenant in tenants},
                "prices": None if prices is None else prices.model_dump(mode="json", by_alias=True),
            }
        )

    def _total(self, tenant: str) -> dict[str, object]:
        known = self._known
        assert known is not None  # noqa: S101 - callers have looked
        month = known.months[self._month]
        total = month.get(tenant, MonthlyTotal())
        boots = known.gateways.get(tenant, {})
        listening = {reader.caller.boot for reader in self.hub}
        oldest = round((self._clock() - REMEMBER_SECONDS) * 1000)
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
    """More than this no budget can be, and JSON of 64 bits cannot say it."""
    return max(-MOST, min(spent, MOST))
