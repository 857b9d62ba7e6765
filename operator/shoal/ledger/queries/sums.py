"""`GET /v1/usage`: sums of counted tokens and other units."""

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import orjson
from sqlalchemy import ColumnElement, Connection, FromClause, and_, func, literal, not_, or_, select

from shoal.api.billing import By, UsagePage, UsageRow
from shoal.core.rating.bill import BilledCounts
from shoal.ledger.bulk import MOST
from shoal.ledger.queries import aggregation, dimensions, times
from shoal.ledger.queries.requests import ROUTE, as_hours
from shoal.ledger.queries.times import Span
from shoal.ledger.schema import hours
from shoal.net.errors import Problem
from shoal.net.shell import ShellRequest

DEFAULT_ROWS: Final = 1_000
MOST_ROWS: Final = 10_000
_COUNTS: Final = (
    "requests", "inputTokens", "cachedTokens", "unknownCachedInputTokens", "outputTokens", "reasoningTokens",
    "unknownRequests", "documents", "images", "audioMs", "imageTokens", "audioTokens", "acceptedTokens",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """A parsed usage query."""

    span: Span
    by: tuple[str, ...]
    only: Mapping[str, Sequence[str]]
    """Filter: dimension (`dimensions.COLUMNS`, or ROUTE) -> accepted values."""
    billed: bool = True
    limit: int = DEFAULT_ROWS
    after: tuple[str | int, ...] | None = None
    """Last row of the previous page."""
    namespace: str | None = None
    """Only usage of the Models of this namespace. None: of all."""


def parse_query(request: ShellRequest, now: int) -> UsageQuery:
    """Parses a query from the parameters of a call. A gateway queries one tenant, and never the fleet. Raises
    Problem."""
    tenants_own = request.caller.role == "gateway"
    names = [name for name in (*dimensions.COLUMNS, ROUTE) if not (tenants_own and name in dimensions.FLEET)]
    narrowing = () if tenants_own else ("namespace",)
    dimensions.only_these(request, [*names, *narrowing, "from", "to", "by", "billed", "limit", "after", "output"])
    only = {name: tuple(request.parameters[name]) for name in names if name in request.parameters}
    if tenants_own and (len(only.get("tenant", ())) != 1 or not only["tenant"][0]):
        raise Problem(400, "a gateway asks for one tenant: tenant=<name>")
    by = dimensions.by(request, (*names, *dimensions.TIMES))
    billed = request.one("billed", "true")
    if billed not in ("true", "false"):
        raise Problem(400, "billed is true, or false for usage that is not billed: retried attempts and estimates")
    return UsageQuery(
        times.span(request, now),
        by,
        only,
        billed == "true",
        dimensions.limit(request, DEFAULT_ROWS, MOST_ROWS),
        _after(request.one("after"), by),
        dimensions.namespace(request),
    )


def answer(connection: Connection, query: UsageQuery) -> UsagePage:
    """One page of the answer."""
    # Hours do not know routes, and requests are not kept as long.
    source = as_hours(query.span) if ROUTE in (*query.by, *query.only) else hours
    columns: list[ColumnElement[Any]] = [_column(name, query.span, source).label(f"by_{name}") for name in query.by]
    inner = (
        select(*columns, *(source.c[column.name] for column in aggregation.SUMMED))
        .where(source.c.hour >= query.span.start, source.c.hour < query.span.end)
        .where(source.c.billed if query.billed else not_(source.c.billed))
        .where(*(_dimension(name, source).in_(values) for name, values in query.only.items()))
        .where(*dimensions.of_namespace(query.namespace, source))
        .subquery()
    )
    keys = [inner.c[f"by_{name}"] for name in query.by]
    rows = select(*keys, *aggregation.sums(inner.c))
    if keys:
        rows = rows.group_by(*keys).order_by(*keys).limit(query.limit + 1)
        if query.after is not None:
            rows = rows.where(_beyond(keys, query.after))
    else:
        rows = rows.having(func.count() > 0)
    found = connection.execute(rows).all()
    shown = found[: query.limit]
    return UsagePage(
        start=times.text(query.span.start),
        end=times.text(query.span.end),
        by=cast("tuple[By, ...]", query.by),
        rows=tuple(_row(query.by, row[: len(keys)], aggregation.counts(row)) for row in shown),
        next=_cursor(shown[-1][: len(keys)]) if len(found) > query.limit else None,
        unseen=() if found else unseen(connection, query.only.get("tenant", ()), query.namespace),
    )


def unseen(connection: Connection, tenants: Sequence[str], namespace: str | None = None) -> tuple[str, ...]:
    """Those of `tenants` that have never had any usage, of the Models of this namespace (None: of all)."""
    return tuple(
        tenant
        for tenant in dict.fromkeys(tenants)
        if connection.execute(
            select(literal(1)).where(hours.c.tenant == tenant, *dimensions.of_namespace(namespace)).limit(1)
        ).first()
        is None
    )


def plain(page: UsagePage) -> list[dict[str, Any]]:
    """Rows for JSON: dimensions that were not requested are absent."""
    return [row.model_dump(mode="json", by_alias=True, include=_fields(page.by)) for row in page.rows]


def table(page: UsagePage) -> tuple[list[str], list[list[object]]]:
    """Column names and rows for CSV, with empty fields for none."""
    names = [*page.by, *_COUNTS]
    return names, [[row[name] for name in names] for row in plain(page)]


def _fields(by: Sequence[str]) -> set[str]:
    named = {"externalID": "external_id", "class": "gpu_class"}
    counted = set(UsageRow.model_fields) - {
        named.get(name, name) for name in (*dimensions.COLUMNS, ROUTE, *dimensions.TIMES)
    }
    return counted | {named.get(name, name) for name in by}


def _column(name: str, span: Span, source: FromClause) -> ColumnElement[Any]:
    if name == "hour":
        return source.c.hour
    if name == "day":
        return aggregation.day(source.c.hour)
    if name == "month":
        first, *later = [whole.start for _, whole in span.months()]
        return aggregation.periods(source.c.hour, first, later)
    return _dimension(name, source)


def _dimension(name: str, source: FromClause) -> ColumnElement[Any]:
    return source.c[name if name == ROUTE else dimensions.COLUMNS[name].name]


def _beyond(keys: Sequence[ColumnElement[Any]], after: Sequence[str | int]) -> ColumnElement[bool]:
    """Condition for rows after this one, in the order of `keys`."""
    return or_(
        *(
            and_(*(key == value for key, value in zip(keys[:place], after[:place], strict=True)), key > after[place])
            for place, key in enumerate(keys)
        )
    )


def _row(by: Sequence[str], values: Sequence[Any], counts: BilledCounts) -> UsageRow:
    shown: dict[str, str | None] = {}
    for name, value in zip(by, values, strict=True):
        match name:
            case "hour":
                shown[name] = times.text(int(value))
            case "day":
                shown[name] = times.day_of(int(value))
            case "month":
                shown[name] = times.month_of(int(value))
            case _:
                shown[name] = value or None
    return UsageRow.model_validate({**shown, **as_fields(counts)})


def as_fields(counts: BilledCounts) -> dict[str, int]:
    """Counts as fields of `TokenCounts`."""
    return {
        "requests": counts.requests,
        "input_tokens": counts.input,
        "cached_tokens": counts.cached,
        "unknown_cached_input_tokens": counts.unknown_cached_input,
        "output_tokens": counts.output,
        "reasoning_tokens": counts.reasoning,
        "unknown_requests": counts.unknown_requests,
        "documents": counts.documents,
        "images": counts.images,
        "audio_ms": counts.audio_ms,
        "image_tokens": counts.image_tokens,
        "audio_tokens": counts.audio_tokens,
        "accepted_tokens": counts.accepted,
    }


def _cursor(values: Sequence[Any]) -> str:
    return base64.urlsafe_b64encode(orjson.dumps([v if isinstance(v, str) else int(v) for v in values])).decode()


def _after(given: str | None, by: Sequence[str]) -> tuple[str | int, ...] | None:
    if given is None:
        return None
    try:
        values: Any = orjson.loads(base64.urlsafe_b64decode(given))
    except (ValueError, binascii.Error):
        values = None
    kinds = [int if name in dimensions.TIMES else str for name in by]
    if not isinstance(values, list) or [type(value) for value in cast("list[object]", values)] != kinds or not kinds:
        raise Problem(400, "after is not a `next` of the same query")
    found = tuple(cast("list[str | int]", values))
    # A database takes neither as a parameter.
    if any("\0" in value if isinstance(value, str) else abs(value) > MOST for value in found):
        raise Problem(400, "after is not a `next` of the same query")
    return found
