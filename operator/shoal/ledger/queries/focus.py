"""`GET /v1/focus`: FOCUS rows as CSV, computed day by day, so that a long period fits in memory."""

import io
from collections.abc import Iterable, Iterator

from sqlalchemy import Connection, select

from shoal.core import cells
from shoal.core.rating.focus import COLUMNS, Account, Period, Row, credit_row, usage_rows
from shoal.core.rating.schedule import Schedule
from shoal.ledger.queries import creditbook, rated, times
from shoal.ledger.queries.times import HOUR_MS, Span
from shoal.ledger.schema import hours


def day_rows(
    connection: Connection, day: Span, prices: Schedule, account: Account, *, tenant: str | None, hourly: bool
) -> list[Row]:
    """Rows of one day, per hour or per day; the first day of a month also has the credits of the month."""
    month = times.month_of(day.start)
    whole = times.month_span(month)
    rows: list[Row] = []
    if day.start == whole.start:
        period = Period(whole.start, whole.end, whole.start, whole.end)
        rows += [
            credit_row(account, name, credit, period, _external_id(connection, name, whole.end))
            for name, _, credit in creditbook.of_months(connection, [month], tenant)
        ]
    more = [hours.c.tenant, *([hours.c.hour] if hourly else [])]
    for usage, values in rated.usage(connection, day, prices, tenant=tenant, more=more):
        start, end = (int(values[1]), int(values[1]) + HOUR_MS) if hourly else (day.start, day.end)
        rows += usage_rows(account, values[0], usage, prices, Period(start, end, whole.start, whole.end))
    return rows


def _external_id(connection: Connection, tenant: str, before: int) -> str | None:
    """External id in the tenant's last usage before that moment. A credit has none of its own: its Tenant may be
    deleted."""
    own = select(hours.c.external_id).where(hours.c.tenant == tenant, hours.c.hour < before)
    return connection.execute(own.order_by(hours.c.hour.desc()).limit(1)).scalar()


def lines(rows: Iterable[Row], *, header: bool) -> Iterator[bytes]:
    """Encodes rows as CSV, in pieces."""
    text = io.StringIO(newline="")
    writer = cells.CSVWriter(text)
    if header:
        writer.row(COLUMNS)
    for row in rows:
        writer.row(row[name] for name in COLUMNS)
        if text.tell() > 64 * 1024:
            yield text.getvalue().encode()
            text.seek(0)
            text.truncate()
    if text.tell():
        yield text.getvalue().encode()
