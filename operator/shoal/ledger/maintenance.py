"""Background work of the ledger: closes requests of dead gateways, retries quarantined records, deletes expired
rows."""

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

import orjson
import structlog
from sqlalchemy import Column, Connection, Table, delete, func, select, text, tuple_

from shoal.ledger import ingest, schema
from shoal.ledger.ingest import REFUSED_BY_DATABASE
from shoal.ledger.ownrows import NOT_ITS_OWN, bound, sender_of
from shoal.ledger.parse import CLOSED, Good, parse
from shoal.ledger.store import DatabaseUnavailable, LedgerStore
from shoal.ledger.sums import Changes, Cost

log = structlog.get_logger()

CLOSE_SECONDS: Final = 15.0
"""Interval of checks for dead gateways."""
RETAIN_SECONDS: Final = 3_600.0
_MOST_ROWS: Final = 5_000
"""Rows per transaction, so that batches do not wait long for it."""
OPEN: Final = text("NOT usage.ended")
"""Condition of the index `usage_open`, spelled exactly as there. SQLite does not recognise the equivalent `usage.ended
= 0` that SQLAlchemy writes, and would scan all requests."""
_DAY_MS: Final = 86_400_000
_GATEWAYS_DAYS: Final = 62
"""Days after its last record until a gateway is forgotten."""


class GatewayLiveness:
    """Time of the last message of each gateway, by boot id, on the monotonic clock: silence counts only while this
    ledger accepts records, and changes of the system clock have no effect."""

    def __init__(self, silence_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout = silence_seconds
        self._clock = clock
        self._began = clock()
        self._last_report: dict[str, float] = {}

    def at(self, boots: Iterable[str]) -> None:
        """Records that these gateways have sent something now."""
        now = self._clock()
        for boot in boots:
            self._last_report[boot] = now

    def begin(self) -> None:
        """Silence counts from now on: before, no gateway could send anything."""
        self._began = self._clock()

    def dead(self, boots: Iterable[str]) -> list[str]:
        """The gateways of `boots` that have been silent for too long."""
        oldest = self._clock() - self._timeout
        return [boot for boot in boots if max(self._began, self._last_report.get(boot, self._began)) <= oldest]

    def keep(self, boots: Iterable[str]) -> None:
        """Forgets gateways that were silent for a day and are not in `boots`."""
        kept, now = set(boots), self._clock()
        self._last_report = {
            b: at for b, at in self._last_report.items() if b in kept or now - at < max(self._timeout, 86_400)
        }


async def close_once(
    store: LedgerStore, liveness: GatewayLiveness, committed: Callable[[Changes], None]
) -> tuple[int, int]:
    """Closes the open rows of dead gateways; returns the number of closed and of remaining open rows.

    Raises:
        DatabaseUnavailable: the database is unavailable.
    """
    if store.error is not None:
        liveness.begin()
        raise DatabaseUnavailable(store.error)
    still = await store.read(_open_rows)
    liveness.keep(still)
    closed = 0
    for boot in liveness.dead(still):
        count = _MOST_ROWS
        while count == _MOST_ROWS:
            count, _ = await store.write(
                lambda c, boot=boot: _close(c, boot, store.cost), lambda found: committed(found[1])
            )
            closed += count
    if closed:
        log.warning("closed the requests that dead gateways left open", requests=closed)
    return closed, sum(still.values()) - closed


def _open_rows(connection: Connection) -> dict[str, int]:
    """Number of open rows by boot id of their gateway; '' if unknown."""
    usage = schema.usage.c
    found = connection.execute(select(usage.gateway, func.count()).where(OPEN).group_by(usage.gateway))
    return {boot or "": count for boot, count in found}


def _close(connection: Connection, boot: str, cost: Cost) -> tuple[int, Changes]:
    usage = schema.usage.c
    whose = usage.gateway == boot if boot else usage.gateway.is_(None)
    found = connection.execute(select(schema.usage).where(OPEN, whose).limit(_MOST_ROWS)).all()
    changes = Changes(cost)
    rows = [ingest.as_usage(row)._replace(step=CLOSED, ended=True, outcome="cut") for row in found]
    for row in rows:
        changes.add(row)
    ingest.store(connection, rows, changes, time.time_ns() // 1_000_000)
    return len(rows), changes


async def retry_quarantined_once(store: LedgerStore, days: int, committed: Callable[[Changes], None]) -> int:
    """Parses quarantined records again: a newer version may accept them. Returns how many count now.

    Raises:
        DatabaseUnavailable: the database is unavailable.
    """
    retaken, after = 0, ""
    while True:
        oldest = time.time_ns() // 1_000_000 - days * _DAY_MS
        found = await store.write(
            lambda c, after=after, oldest=oldest: _retry_page(c, after, oldest, store.cost),
            lambda done: committed(done[2]),
        )
        after, count, _ = found
        retaken += count
        if not after:
            break
    if retaken:
        log.info("quarantined records were accepted", records=retaken)
    return retaken


def _retry_page(connection: Connection, after: str, oldest: int, cost: Cost) -> tuple[str, int, Changes]:
    """Processes one page: returns its last digest ('' at the end), how many records count now, and the changes of the
    sums."""
    now, aside = time.time_ns() // 1_000_000, schema.aside.c
    query = select(aside.digest, aside.reason, aside.body).where(aside.digest > after)
    page = connection.execute(query.order_by(aside.digest).limit(_MOST_ROWS)).all()
    good: dict[str, Good] = {}
    for digest, reason, body in page:
        sender, why = sender_of(reason)
        if why.startswith((REFUSED_BY_DATABASE, NOT_ITS_OWN)):
            continue  # no newer version accepts these either
        record = parse(orjson.loads(body), now)
        if sender is not None:
            record = bound(record, sender)
        if isinstance(record, Good) and record.row.admitted_at >= oldest:
            good[digest] = record
    if good:
        # Deleted before the records are written, because the write may quarantine one again.
        connection.execute(delete(schema.aside).where(aside.digest.in_(list(good))))
    _, changes = ingest.write(connection, [list(good.values())], now, cost=cost)
    return (page[-1].digest if len(page) == _MOST_ROWS else ""), len(good), changes


async def retain(store: LedgerStore, days: int, hours_days: int) -> None:
    """Deletes expired rows until cancelled."""
    while True:
        try:
            await retain_once(store, days, hours_days, time.time_ns() // 1_000_000)
        except DatabaseUnavailable:
            await asyncio.sleep(CLOSE_SECONDS)
        else:
            await asyncio.sleep(RETAIN_SECONDS)


async def retain_once(store: LedgerStore, days: int, hours_days: int, now_ms: int) -> int:
    """Deletes rows older than `days`, and sums older than `hours_days`; returns the number of rows. Credits are
    kept."""
    old, old_hours = now_ms - days * _DAY_MS, now_ms - hours_days * _DAY_MS
    plan: list[tuple[Table, Column[Any], int]] = [
        # One day longer than the allowed delay of a record, so that a repeated record always finds its first copy.
        (schema.records, schema.records.c.received_at, old - _DAY_MS),
        (schema.usage, schema.usage.c.admitted_at, old),
        (schema.aside, schema.aside.c.received_at, old),
        (schema.hours, schema.hours.c.hour, old_hours),
        (schema.gateways, schema.gateways.c.heard_at, now_ms - _GATEWAYS_DAYS * _DAY_MS),
        (schema.engine_hours, schema.engine_hours.c.hour, old_hours),
    ]
    deleted = 0
    for table, column, before in plan:
        while count := await store.write(lambda c, t=table, col=column, b=before: _delete(c, t, col, b)):
            deleted += count
            if count < _MOST_ROWS:
                break
    if deleted:
        log.info("deleted what is older than the retention", rows=deleted)
    return deleted


def _delete(connection: Connection, table: Table, column: Column[Any], before: int) -> int:
    key = table.primary_key.columns
    old = select(*key).where(column < before)
    if table is schema.usage:
        old = old.where(schema.usage.c.ended)
    return connection.execute(delete(table).where(tuple_(*key).in_(old.limit(_MOST_ROWS)))).rowcount
