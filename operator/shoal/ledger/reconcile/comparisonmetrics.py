"""Metrics of the comparison between the engines' counters and billed usage, by Model.

They cover the last 24 whole hours and the current one: over a shorter period, requests in progress would weigh too
much, since engines have counted them but they are not billed yet.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Protocol, TypeVar

import structlog
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import Connection

from shoal.core.reconcile import DAY_MS, HOUR_MS, Compared, Tokens
from shoal.ledger.queries.times import Span
from shoal.ledger.reconcile.compare import Key, TooMany, by_sums
from shoal.ledger.store import DatabaseUnavailable

log = structlog.get_logger()

T = TypeVar("T")

EVERY_SECONDS: Final = 60.0
_LABELS: Final = ["model", "kind"]
"""`model` is `namespace/name`."""


class ReadingSource(Protocol):
    """The part of `ledger.store.LedgerStore` that is needed here."""

    async def read(self, work: Callable[[Connection], T]) -> T: ...


class ComparisonMetrics(Collector):
    """`run` reads every minute; a scrape shows the last result, or nothing if the read failed."""

    def __init__(self, store: ReadingSource, now: Callable[[], int]) -> None:
        """`now`: milliseconds since 1970."""
        self._store, self._now = store, now
        self._rows: Mapping[Key, Compared] = {}

    async def run(self) -> None:
        """Reads periodically until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(EVERY_SECONDS)

    async def refresh(self) -> None:
        now = self._now()
        hour = now - now % HOUR_MS
        span = Span(hour - DAY_MS, hour + HOUR_MS)
        try:
            self._rows = await self._store.read(lambda connection: by_sums(connection, span, ("model",)))
        except (DatabaseUnavailable, TooMany) as error:
            self._rows = {}  # outdated values are not shown as current
            log.debug("no comparison for scrapers", reason=str(error))

    def collect(self) -> Iterable[Metric]:
        engine = GaugeMetricFamily(
            "shoal_ledger_engine_tokens",
            "Tokens that engines counted in the last 24 hours; no sample: no engine reported.",
            labels=_LABELS,
        )
        billed = GaugeMetricFamily(
            "shoal_ledger_billed_tokens", "Tokens of billed requests of the last 24 hours.", labels=_LABELS
        )
        left = GaugeMetricFamily(
            "shoal_ledger_unattributed_tokens",
            "Tokens that engines counted beyond billed ones; negative if the last counts of an engine are missing.",
            labels=_LABELS,
        )
        for key, compared in self._rows.items():
            for family, tokens in (
                (engine, compared.engine),
                (billed, compared.billed),
                (left, compared.unattributed),
            ):
                _add(family, key.model or "", tokens)
        return (engine, billed, left)


def _add(family: GaugeMetricFamily, model: str, tokens: Tokens | None) -> None:
    if tokens is not None:
        family.add_metric([model, "input"], tokens.input)
        family.add_metric([model, "output"], tokens.output)
