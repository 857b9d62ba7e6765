"""What scrapers see of engines' counters beside what was billed."""

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import Connection

from shoal.core.reconcile import HOUR_MS
from shoal.ledger.queries.times import moment
from shoal.ledger.reconcile.comparisonmetrics import ComparisonMetrics
from shoal.ledger.schema import engine_hours, hours
from shoal.ledger.store import DatabaseUnavailable
from tests.support.ledger import server, url
from tests.support.ledgertables import LedgerTables

__all__ = ["server", "url"]

T = TypeVar("T")
HOUR = moment("from", "2026-11-22T10:00:00Z")
NOW = HOUR + HOUR_MS // 2


class Desk:
    """The figures, over tables that a test fills."""

    def __init__(self, tables: LedgerTables) -> None:
        self.tables = tables
        self.down = False
        self.registry = CollectorRegistry()
        self.stats = ComparisonMetrics(self, lambda: NOW)
        self.registry.register(self.stats)

    async def read(self, work: Callable[[Connection], T]) -> T:
        if self.down:
            raise DatabaseUnavailable("the database does not answer")
        with self.tables.begin() as connection:
            return work(connection)

    def engine(self, prompt: int, generation: int, **more: Any) -> None:
        values = {"hour": HOUR, "model": "chat/llama", "gpu_class": "h100", **more}
        self.tables.add(engine_hours, prompt_tokens=prompt, generation_tokens=generation, **values)

    def used(self, input: int, output: int, **more: Any) -> None:
        values = {"hour": HOUR, "model": "chat/llama", "gpu_class": "h100", "billed": True, **more}
        self.tables.add(hours, input_tokens=input, output_tokens=output, **values)

    def tokens(self, what: str, kind: str, model: str = "llama") -> float | None:
        labels = {"model": f"chat/{model}", "kind": kind}
        return self.registry.get_sample_value(f"shoal_ledger_{what}_tokens", labels)


@pytest.fixture
def desk(url: str) -> Desk:
    return Desk(LedgerTables(url))


async def test_what_engines_counted_beyond_the_bill_is_unattributed(desk: Desk) -> None:
    desk.engine(1_000, 500)
    desk.used(900, 480)
    await desk.stats.refresh()
    assert desk.tokens("engine", "input") == 1_000
    assert desk.tokens("billed", "output") == 480
    assert [desk.tokens("unattributed", kind) for kind in ("input", "output")] == [100, 20]


async def test_engines_that_nobody_heard_leave_it_unknown(desk: Desk) -> None:
    desk.used(900, 480)
    await desk.stats.refresh()
    assert desk.tokens("billed", "input") == 900
    assert desk.tokens("engine", "input") is None
    assert desk.tokens("unattributed", "input") is None


async def test_only_the_last_day_counts(desk: Desk) -> None:
    desk.engine(1, 1, hour=HOUR - 24 * HOUR_MS)
    desk.engine(1_000, 1_000, hour=HOUR - 25 * HOUR_MS)
    await desk.stats.refresh()
    assert desk.tokens("engine", "input") == 1


async def test_a_database_that_is_away_leaves_nothing_known(desk: Desk) -> None:
    desk.engine(1_000, 500)
    await desk.stats.refresh()
    desk.down = True
    await desk.stats.refresh()
    assert desk.tokens("engine", "input") is None
