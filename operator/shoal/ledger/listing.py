"""Single requests as the ledger has them, for people (`shoal ledger records`)."""

from collections.abc import Iterator
from datetime import UTC, datetime

import orjson
from sqlalchemy import select
from sqlalchemy.exc import DBAPIError

from shoal.ledger import schema
from shoal.ledger.database import Database, DatabaseUnavailable, reason

_HEADER = (
    f"{'ADMITTED':<20} {'REQUEST':<36} {'TENANT':<12} {'MODEL':<24} {'ENDED':<5} {'OUTCOME':<9} "
    f"{'INPUT':>7} {'CACHED':>7} {'OUTPUT':>7} COUNTS"
)


def lines(
    database: Database, *, request: str | None, tenant: str | None, aside: bool, limit: int, output: str
) -> Iterator[str]:
    """Lines for the newest `limit` matching rows, oldest first.

    Raises:
        DatabaseUnavailable: the database cannot be read.
    """
    if database.kind == "sqlite" and not database.path.is_file():
        raise DatabaseUnavailable(f"no database at {database.path}")
    try:
        if aside:
            yield from _quarantined(database, limit, output)
        else:
            yield from _usage(database, request, tenant, limit, output)
    except DBAPIError as error:
        raise DatabaseUnavailable(reason(error)) from error


def _usage(database: Database, request: str | None, tenant: str | None, limit: int, output: str) -> Iterator[str]:
    usage = schema.usage
    query = select(usage).order_by(usage.c.admitted_at.desc(), usage.c.request, usage.c.attempt).limit(limit)
    if request is not None:
        query = query.where(usage.c.request == request)
    if tenant is not None:
        query = query.where(usage.c.tenant == tenant)
    with database.reading.connect() as connection:
        rows = connection.execute(query).all()
    if output == "table":
        yield _HEADER
    for row in reversed(rows):
        if output == "json":
            yield orjson.dumps(dict(zip(map(str, usage.columns.keys()), row, strict=True))).decode()
            continue
        name = row.request if row.attempt == 0 else f"{row.request}:attempt:{row.attempt}"
        ended = "yes" if row.ended else "no"
        yield (
            f"{_time(row.admitted_at):<20} {name:<36} {row.tenant:<12} {row.model:<24} {ended:<5} "
            f"{row.outcome or '-':<9} {_number(row.input_tokens):>7} {_number(row.cached_tokens):>7} "
            f"{_number(row.output_tokens):>7} {row.count_source}"
        )


def _quarantined(database: Database, limit: int, output: str) -> Iterator[str]:
    with database.reading.connect() as connection:
        found = schema.aside
        rows = connection.execute(select(found).order_by(found.c.received_at.desc()).limit(limit)).all()
    for row in reversed(rows):
        if output == "json":
            said = {"receivedAt": _time(row.received_at), "reason": row.reason, "record": orjson.loads(row.body)}
            yield orjson.dumps(said).decode()
        else:
            yield f"{_time(row.received_at)} {row.digest[:12]} {row.reason}"


def _time(ms: int) -> str:
    return f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%dT%H:%M:%SZ}"


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)
