"""Stored requests as if they were hours: for dimensions that only requests have.

`hours` has no route: it would be one more column of its primary key, and an older ledger could not write to it any
more. Requests are kept for the retention of records only, and so is usage by route.
"""

from typing import Any, Final

from sqlalchemy import ColumnElement, Subquery, and_, case, func, literal_column, or_, select

from shoal.core.fields.table import TRANSCRIBE
from shoal.ledger.queries.times import Span
from shoal.ledger.schema import usage
from shoal.ledger.sums import HOUR_MS

ROUTE: Final = "route"
_NONE: Final[ColumnElement[int]] = literal_column("0")
_ONE: Final[ColumnElement[int]] = literal_column("1")
_HOUR: Final[ColumnElement[int]] = literal_column(str(HOUR_MS))


def as_hours(span: Span) -> Subquery:
    """Ended requests and attempts of a span, with the columns of `schema.hours` and `route`. The numbers are those of
    `sums.sums_of`; a test compares both."""
    columns = usage.c
    given, cached = func.coalesce(columns.input_tokens, 0), func.coalesce(columns.cached_tokens, 0)
    read = columns.count_source != "none"
    unknown = and_(
        columns.input_tokens.is_(None),
        or_(columns.audio_ms.is_(None), columns.endpoint != TRANSCRIBE),
        columns.attempts > 0,
        or_(columns.outcome.is_(None), columns.outcome != "rejected"),
    )
    found: dict[str, ColumnElement[Any]] = {
        "hour": columns.admitted_at - columns.admitted_at % _HOUR,
        "tenant": columns.tenant,
        "external_id": func.coalesce(columns.external_id, ""),
        "key_name": columns.key_name,
        "plan": func.coalesce(columns.plan, ""),
        "model": columns.model,
        "adapter": func.coalesce(columns.adapter, ""),
        "gpu_class": func.coalesce(columns.gpu_class, ""),
        "route": func.coalesce(columns.route, ""),
        "billed": and_(columns.attempt == 0, columns.count_source != "estimated"),
        "requests": _if(columns.attempt == 0, _ONE),
        "input_tokens": given,
        "cached_tokens": case((cached > given, given), else_=cached),
        "unknown_cached_input": _if(columns.cached_tokens.is_(None), given),
        "output_tokens": func.coalesce(columns.output_tokens, 0),
        "reasoning_tokens": func.coalesce(columns.reasoning_tokens, 0),
        "unknown_requests": _if(unknown, _ONE),
        "documents": _if(read, func.coalesce(columns.documents, 0)),
        "images": _if(read, func.coalesce(columns.images, 0)),
        "audio_ms": _if(read, func.coalesce(columns.audio_ms, 0)),
        "image_tokens": func.coalesce(columns.image_tokens, 0),
        "audio_tokens": func.coalesce(columns.audio_tokens, 0),
        "accepted_tokens": func.coalesce(columns.accepted_tokens, 0),
    }
    return (
        select(*(column.label(name) for name, column in found.items()))
        .where(columns.ended, columns.admitted_at >= span.start, columns.admitted_at < span.end)
        .subquery()
    )


def _if(condition: ColumnElement[bool], then: ColumnElement[Any]) -> ColumnElement[Any]:
    return case((condition, then), else_=_NONE)
