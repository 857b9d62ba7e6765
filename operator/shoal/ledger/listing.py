"""Single requests as the ledger has them, for people (`shoal ledger records`)."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import orjson
from sqlalchemy import select
from sqlalchemy.exc import DBAPIError

from shoal.ledger import schema
from shoal.ledger.database import Database, DatabaseUnavailable, reason

_HEADER = (
    f"{'ADMITTED':<20} {'REQUEST':<36} {'TENANT':<12} {'MODEL':<24} {'ENDED':<5} {'OUTCOME':<9} "
    f"{'INPUT':>7} {'CACHED':>7} {'OUTPUT':>7} COUNTS"
)


class Listing(NamedTuple):
    """Rows, oldest first."""

    columns: Sequence[str]
    """Of the documents, those of a table."""
    documents: Sequence[dict[str, Any]]
    lines: Sequence[str]
    """The same for people."""


def newest(database: Database, *, request: str | None, tenant: str | None, aside: bool, limit: int) -> Listing:
    """The newest `limit` matching rows.

    Raises:
        DatabaseUnavailable: the database cannot be read.
    """
    if database.kind == "sqlite" and not database.path.is_file():
        raise DatabaseUnavailable(f"no database at {database.path}")
    try:
        return _quarantined(database, limit) if aside else _usage(database, request, tenant, limit)
    except DBAPIError as error:
        raise DatabaseUnavailable(reason(error)) from error


def _usage(database: Database, request: str | None, tenant: str | None, limit: int) -> Listing:
    usage = schema.usage
    query = select(usage).order_by(usage.c.admitted_at.desc(), usage.c.request, usage.c.attempt).limit(limit)
    if request is not None:
        query = query.where(usage.c.request == request)
    if tenant is not None:
        query = query.where(usage.c.tenant == tenant)
    with database.reading.connect() as connection:
        rows = connection.execute(query).all()[::-1]
    columns = [str(column.key) for column in usage.columns]
    lines = [_HEADER]
    for row in rows:
        name = row.request if row.attempt == 0 else f"{row.request}:attempt:{row.attempt}"
        ended = "yes" if row.ended else "no"
        lines.append(
            f"{_time(row.admitted_at):<20} {name:<36} {row.tenant:<12} {row.model:<24} {ended:<5} "
            f"{row.outcome or '-':<9} {_number(row.input_tokens):>7} {_number(row.cached_tokens):>7} "
            f"{_number(row.output_tokens):>7} {row.count_source}"
        )
    return Listing(columns, [dict(zip(columns, row, strict=True)) for row in rows], lines)


def _quarantined(database: Database, limit: int) -> Listing:
    with database.reading.connect() as connection:
        found = schema.aside
        rows = connection.execute(select(found).order_by(found.c.received_at.desc()).limit(limit)).all()[::-1]
    documents: list[dict[str, Any]] = [
        {
            "receivedAt": _time(row.received_at),
            "digest": row.digest,
            "reason": row.reason,
            "record": orjson.loads(row.body),
        }
        for row in rows
    ]
    lines = [f"{_time(row.received_at)} {row.digest[:12]} {row.reason}" for row in rows]
    return Listing(("receivedAt", "digest", "reason"), documents, lines or ["no record is quarantined"])


def _time(ms: int) -> str:
    return f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%dT%H:%M:%SZ}"


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)
