"""Billed usage per period of constant prices, for bills, margins and exports."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, select

from shoal.core.rating.bill import Usage
from shoal.core.rating.schedule import Schedule
from shoal.ledger.queries import aggregation
from shoal.ledger.queries.times import Span
from shoal.ledger.schema import hours


def usage(
    connection: Connection,
    span: Span,
    schedule: Schedule,
    *,
    tenant: str | None = None,
    more: Sequence[ColumnElement[Any]] = (),
) -> list[tuple[Usage, tuple[Any, ...]]]:
    """Billed usage of one tenant or of all, with the values of `more`, which are additional dimensions."""
    piece = aggregation.periods(hours.c.hour, span.start, schedule.changes(span.start, span.end)).label("piece")
    extra = [column.label(f"more_{number}") for number, column in enumerate(more)]
    what = (hours.c.plan, hours.c.model, hours.c.adapter, hours.c.external_id, hours.c.gpu_class)
    inner = select(piece, *what, *extra, *aggregation.SUMMED).where(
        hours.c.hour >= span.start, hours.c.hour < span.end, aggregation.billed(True)
    )
    if tenant is not None:
        inner = inner.where(hours.c.tenant == tenant)
    within = inner.subquery()
    keys = [within.c[name] for name in ("piece", *(column.name for column in what), *(e.name for e in extra))]
    rows = connection.execute(select(*keys, *aggregation.sums(within.c)).group_by(*keys).order_by(*keys))
    return [
        (
            Usage(
                start=int(row[0]),
                plan=row[1] or None,
                model=row[2],
                adapter=row[3] or None,
                external_id=row[4] or None,
                gpu_class=row[5] or None,
                counts=aggregation.counts(row),
            ),
            tuple(row[6 : 6 + len(extra)]),
        )
        for row in rows
    ]
