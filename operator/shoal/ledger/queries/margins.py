"""`GET /v1/margin`: revenue of GPU classes from `hours`, their cost from `engine_hours`."""

from typing import Any, Final, cast

from sqlalchemy import ColumnElement, Connection, Integer, Table, func, literal_column, select

from shoal.api.billing import Margin, MarginRow
from shoal.core.rating import money
from shoal.core.rating.margin import Result, Spent, margins
from shoal.core.rating.schedule import Schedule
from shoal.ledger.queries import aggregation, rated, times
from shoal.ledger.queries.times import Span
from shoal.ledger.schema import engine_hours, hours

BY: Final = ("class", "model", "day", "month")


def answer(connection: Connection, span: Span, by: tuple[str, ...], prices: Schedule) -> Margin:
    """Margin of the span by the dimensions `by`; of everything if `by` is empty."""
    earned = [
        (_key(by, more), usage)
        for usage, more in rated.usage(connection, span, prices, more=[_column(hours, name, span) for name in by])
    ]
    columns = [_column(engine_hours, name, span).label(f"by_{name}") for name in by]
    within = (
        select(*columns, engine_hours.c.currency, engine_hours.c.gpu_seconds, engine_hours.c.cost)
        .where(engine_hours.c.hour >= span.start, engine_hours.c.hour < span.end)
        .subquery()
    )
    keys = [*(within.c[f"by_{name}"] for name in by), within.c.currency]
    # In two halves, because SQLite's sums of integers are limited to 64 bits.
    half = literal_column("1000000000", Integer)
    high, low = within.c.cost // half, within.c.cost % half
    rows = connection.execute(
        select(*keys, func.sum(within.c.gpu_seconds), func.sum(high), func.sum(low)).group_by(*keys).order_by(*keys)
    )
    spent = [
        (_key(by, tuple(row[: len(by)])), Spent(float(row[-3]), (int(row[-2]) * 10**9 + int(row[-1])) * 1_000, row[-4]))
        for row in rows
        # Tokens without any GPU time have an unknown cost.
        if any(row[-3:])
    ]
    currency = prices.currency
    return Margin(
        start=times.text(span.start),
        end=times.text(span.end),
        by=cast(Any, by),
        currency=currency,
        rows=tuple(_row(by, key, found, currency) for key, found in margins(earned, spent, prices).items()),
    )


def _column(table: Table, name: str, span: Span) -> ColumnElement[Any]:
    if name == "class":
        return table.c.gpu_class
    if name == "model":
        return table.c.model
    if name == "day":
        return aggregation.day(table.c.hour)
    first, *later = [whole.start for _, whole in span.months()]
    return aggregation.periods(table.c.hour, first, later)


def _key(by: tuple[str, ...], values: tuple[Any, ...]) -> tuple[str, ...]:
    named = {"day": times.day_of, "month": times.month_of}
    return tuple(
        named[name](int(value)) if name in named else str(value) for name, value in zip(by, values, strict=True)
    )


def _row(by: tuple[str, ...], key: tuple[str, ...], found: Result, currency: str | None) -> MarginRow:
    margin = found.margin(currency)
    one_cost = next(iter(found.costs.items())) if len(found.costs) == 1 else None
    return MarginRow.model_validate(
        {
            **{name: value or None for name, value in zip(by, key, strict=True)},
            "tokens": found.tokens,
            "unpriced_tokens": found.unpriced_tokens,
            "audio_ms": found.audio_ms,
            "unpriced_audio_ms": found.unpriced_audio_ms,
            "revenue": None if found.revenue is None else money.exact(found.revenue),
            "gpu_hours": None if found.gpu_seconds is None else found.gpu_seconds / 3600,
            "unpriced_gpu_hours": found.unpriced_gpu_seconds / 3600,
            "cost": None if one_cost is None else money.exact(one_cost[1]),
            "cost_currency": None if one_cost is None else one_cost[0],
            "margin": None if margin is None else money.exact(margin),
            "margin_percent": f"{100 * margin / found.revenue:.1f}" if margin is not None and found.revenue else None,
        }
    )
