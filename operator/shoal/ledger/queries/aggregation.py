"""SQL shared by queries: periods as a column, and sums."""

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import ColumnElement, case, func, literal_column, not_

from shoal.core.rating.bill import BilledCounts
from shoal.ledger.queries.times import DAY_MS
from shoal.ledger.schema import hours

SUMMED: Final = (
    hours.c.requests,
    hours.c.input_tokens,
    hours.c.cached_tokens,
    hours.c.unknown_cached_input,
    hours.c.output_tokens,
    hours.c.reasoning_tokens,
    hours.c.unknown_requests,
    hours.c.documents,
    hours.c.images,
    hours.c.audio_ms,
    hours.c.image_tokens,
    hours.c.audio_tokens,
    hours.c.accepted_tokens,
)
"""In the order of `BilledCounts`."""


def periods(column: ColumnElement[int], start: int, changes: Sequence[int]) -> ColumnElement[int]:
    """Start of the period that contains an hour: `start`, or the last of `changes` (ascending)."""
    # Literal numbers: with parameters the server would not recognise two equal expressions.
    if not changes:
        return literal_column(str(int(start)))
    begins = [start, *changes]
    return case(
        *((column < _number(end), _number(begin)) for begin, end in zip(begins, changes, strict=False)),
        else_=_number(changes[-1]),
    )


def day(column: ColumnElement[int]) -> ColumnElement[int]:
    """Start of the day that contains an hour."""
    return column - column % _number(DAY_MS)


def sums(columns: Any) -> list[ColumnElement[Any]]:
    """Sums of the counts, from the columns of a selection."""
    return [func.sum(columns[column.name]).label(column.name) for column in SUMMED]


def counts(row: Sequence[Any]) -> BilledCounts:
    """Counts from a row that ends with `sums`. PostgreSQL's sums of large integers are Decimals."""
    return BilledCounts(*(int(value or 0) for value in row[-len(SUMMED) :]))


def billed(yes: bool) -> ColumnElement[bool]:
    """Condition for billed usage: without attempts that reached no client, and without estimates."""
    return hours.c.billed if yes else not_(hours.c.billed)


def _number(value: int) -> ColumnElement[int]:
    return literal_column(str(int(value)))
