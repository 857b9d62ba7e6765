"""Writes batches of records, in one transaction of the writer.

Deduplication is part of the transaction: a final row counts if it is new in `records`; an open row or a checkpoint
counts if it advances its request. A batch may therefore arrive any number of times, in any order, and rows that were
not committed were not counted.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Connection

from shoal.api.ledger import BatchAnswer
from shoal.ledger import bulk, schema
from shoal.ledger.ownrows import claimed, quarantine_reason
from shoal.ledger.parse import Bad, Good, Incoming, bad
from shoal.ledger.sums import Changes, Cost, free, settle
from shoal.metering.record import StoredRow

REFUSED_BY_DATABASE: Final = "the database does not take it"
_ONCE: Final = "ON CONFLICT DO NOTHING RETURNING source, id"
_USAGE_COLUMNS: Final = StoredRow._fields
_KNOWN_COLUMNS: Final = ("source", "request", "attempt", "step", "ended", "admitted_at", "gateway")

Key = tuple[str, str, int]
"""Source, request, attempt."""
KnownRow = tuple[int, bool, int, str | None]
"""Step, whether the request has ended, admission time, boot id of its gateway."""


def write(
    connection: Connection,
    batches: Sequence[Sequence[Incoming]],
    now_ms: int,
    keep_ms: int | None = None,
    cost: Cost = free,
) -> tuple[list[BatchAnswer], Changes]:
    """Stores the new records of each batch; returns the answer to each batch, and the changes of the sums.

    A record that was admitted more than `keep_ms` ago is quarantined, since it may have been counted already. A record
    of a verified sender whose request belongs to another gateway is quarantined too.
    """
    oldest = 0 if keep_ms is None else now_ms - keep_ms
    timely = [[_timely(each, oldest) for each in batch] for batch in batches]
    known_rows = _known(connection, timely)
    owned = _owned(timely, known_rows)
    _quarantine(connection, (each for batch in owned for each in batch if isinstance(each, Bad)), now_ms)
    once = {
        (each.row.source, each.id): each
        for batch in owned
        for each in batch
        if isinstance(each, Good) and each.row.ended
    }
    fresh = {
        (row.source, row.id)
        for row in bulk.insert(
            connection,
            schema.records,
            [(e.row.source, e.id, e.row.request, e.kind, now_ms, e.body) for e in once.values()],
            _ONCE,
        )
    }
    answers: list[BatchAnswer] = []
    best: dict[Key, StoredRow] = {}
    gateways_seen: set[str] = set()
    seen: set[tuple[str, str]] = set()
    for batch in owned:
        new = known = aside = 0
        for each in batch:
            if isinstance(each, Bad):
                aside += 1
                continue
            key, name = _key(each.row), (each.row.source, each.id)
            if each.row.gateway:
                gateways_seen.add(each.row.gateway)
            counts = name in fresh if each.row.ended else key not in known_rows or each.row.step > known_rows[key][0]
            if name in seen or not counts:
                known += 1
                continue
            seen.add(name)
            new += 1
            before = best.get(key)
            if before is None:
                best[key] = each.row
            elif (current := settle(before, each.row)) is not None:
                best[key] = current
        answers.append(BatchAnswer(new=new, known=known, aside=aside))
    again = [key for key in best if key in known_rows and known_rows[key][1]]
    full = _full(connection, again)
    changes = Changes(cost, gateways_seen=gateways_seen)
    rows: list[StoredRow] = []
    for key, row in best.items():
        if (found := known_rows.get(key)) is not None:
            step, ended, admitted_at, _ = found
            if row.step <= step:
                continue
            row = row._replace(admitted_at=admitted_at)
            if ended:
                changes.add(full[key], -1)
        if row.ended:
            changes.add(row)
        rows.append(row)
    store(connection, rows, changes, now_ms)
    return answers, changes


def store(connection: Connection, rows: Sequence[StoredRow], changes: Changes, now_ms: int) -> None:
    """Writes the current rows, and adds the changes to the sums."""
    bulk.insert(connection, schema.usage, rows, bulk.replacing(schema.usage))
    hours = [(*key, *sums) for key, sums in changes.hours.items() if any(sums)]
    bulk.insert(connection, schema.hours, hours, bulk.adding(schema.hours))
    gateways = [
        (*key, own.requests, own.tokens, max(-bulk.MOST, min(own.spent, bulk.MOST)), now_ms)
        for key, own in changes.gateways.items()
        if any(own)
    ]
    bulk.insert(
        connection, schema.gateways, gateways, bulk.adding(schema.gateways, latest=("heard_at",), bounded=("spent",))
    )


def one_by_one(
    connection: Connection, batches: Sequence[Sequence[Incoming]], now_ms: int, is_outage: Callable[[Exception], bool]
) -> list[list[Incoming]]:
    """The same batches, with records that the database refuses replaced by `Bad`. Writes nothing.

    Raises:
        Exception: an error that, according to `is_outage`, is not caused by a record.
    """
    checked: list[list[Incoming]] = []
    for batch in batches:
        result: list[Incoming] = []
        for each in batch:
            try:
                with connection.begin() as transaction:
                    write(connection, [[each]], now_ms)
                    transaction.rollback()
            except Exception as error:
                if is_outage(error):
                    raise
                result.append(bad(f"{REFUSED_BY_DATABASE}: {getattr(error, 'orig', None) or error}", each.body))
            else:
                result.append(each)
        checked.append(result)
    return checked


def _timely(each: Incoming, oldest: int) -> Incoming:
    if isinstance(each, Good) and each.row.admitted_at < oldest:
        why = "it came after the retention: whether it was counted already is not known any more"
        return bad(quarantine_reason(why, each.sender), each.body)
    return each


def _known(connection: Connection, batches: Sequence[Sequence[Incoming]]) -> dict[Key, KnownRow]:
    """The stored state of these rows. For an attempt row of a verified sender, the row of its request is included,
    because it identifies the owner."""
    keys: set[Key] = set()
    for batch in batches:
        for each in batch:
            if isinstance(each, Good):
                keys.add(_key(each.row))
                if each.sender is not None and each.row.attempt:
                    keys.add((each.row.source, each.row.request, 0))
    return {
        (row.source, row.request, row.attempt): (row.step, row.ended, row.admitted_at, row.gateway)
        for row in bulk.select(connection, schema.usage, _KNOWN_COLUMNS, list(keys))
    }


def _owned(batches: Sequence[Sequence[Incoming]], known: Mapping[Key, KnownRow]) -> list[list[Incoming]]:
    """The same batches, with a row of a verified sender replaced by `Bad` if its request belongs to another gateway. A
    request belongs to the gateway whose row arrived first; ids are random, so another gateway cannot be first by
    accident."""
    firsts: dict[tuple[str, str], str | None] = {}
    found: list[list[Incoming]] = []
    for batch in batches:
        kept: list[Incoming] = []
        for each in batch:
            if isinstance(each, Good):
                row = each.row
                whose = (row.source, row.request)
                if whose not in firsts:
                    current = known.get((*whose, 0)) or known.get(_key(row))
                    firsts[whose] = row.gateway if current is None else current[3]
                each = claimed(each, firsts[whose])
            kept.append(each)
        found.append(kept)
    return found


def _quarantine(connection: Connection, records: Iterable[Bad], now_ms: int) -> None:
    rows = {each.digest: (each.digest, now_ms, each.reason, each.body) for each in records}
    bulk.insert(connection, schema.aside, list(rows.values()), "ON CONFLICT DO NOTHING")


def _key(row: StoredRow) -> Key:
    return (row.source, row.request, row.attempt)


def _full(connection: Connection, keys: Sequence[Key]) -> dict[Key, StoredRow]:
    return {
        _key(row): row
        for row in (as_usage(each) for each in bulk.select(connection, schema.usage, _USAGE_COLUMNS, keys))
    }


def as_usage(row: Sequence[Any]) -> StoredRow:
    """A row of `schema.usage`. SQLite's driver gives booleans as 0 and 1."""
    usage = StoredRow(*row)
    return usage._replace(ended=bool(usage.ended), stream=bool(usage.stream))
