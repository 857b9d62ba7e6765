"""Compares the engines' counters with billed usage, from the tables."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Table, func, select

from shoal.core.reconcile import Compared, Tokens
from shoal.ledger.queries import aggregation
from shoal.ledger.queries.times import Span
from shoal.ledger.schema import engine_hours, engines, hours, usage

MOST_ROWS: Final = 20_000


class TooMany(Exception):
    """The answer would have too many rows."""


@dataclass(frozen=True, slots=True)
class Key:
    """Key of one row; None: not a dimension of the query."""

    at: int | None = None
    """Start of the hour, day or month, in milliseconds since 1970 (UTC)."""
    model: str | None = None
    gpu_class: str | None = None
    engine: str | None = None
    replica: str | None = None
    last_report: int | None = None


def by_sums(
    connection: Connection, span: Span, by: Collection[str], model: Collection[str] = ()
) -> dict[Key, Compared]:
    """Compares the hours of the span by model, class, and one of hour, day and month. A request counts in the hour of
    its admission, an engine's counter in the hour of its reading. Raises TooMany."""
    rows: defaultdict[Key, Compared] = defaultdict(lambda: Compared(None, estimated_input=0))
    counted = (engine_hours.c.prompt_tokens, engine_hours.c.generation_tokens)
    for key, (prompt, answer) in _grouped(connection, engine_hours, counted, span, by, model):
        rows[key] += Compared(Tokens(prompt, answer))
    counts = (hours.c.input_tokens, hours.c.output_tokens)
    for key, (prompt, answer) in _grouped(connection, hours, counts, span, by, model, aggregation.billed(True)):
        rows[key] += Compared(None, Tokens(prompt, answer))
    unpaid = (*counts, hours.c.estimated_input)
    for key, (prompt, answer, estimated) in _grouped(
        connection, hours, unpaid, span, by, model, aggregation.billed(False)
    ):
        rows[key] += Compared(None, Tokens(), Tokens(prompt, answer), estimated)
    _bounded(rows)
    return dict(rows)


def by_engine(connection: Connection, span: Span, model: Collection[str] = ()) -> dict[Key, Compared]:
    """Compares the engine processes that reported in the span, each over its whole lifetime. It reads single requests,
    which are kept for less time than sums. Raises TooMany."""
    wanted = select(engines).where(engines.c.last_heard >= span.start, engines.c.first_heard < span.end)
    if model:
        wanted = wanted.where(engines.c.model.in_(model))
    keys: dict[str, Key] = {}
    rows: dict[str, Compared] = {}
    for row in connection.execute(wanted.limit(MOST_ROWS + 1)).mappings():
        boot: str = row["boot"]
        keys[boot] = Key(None, row["model"], row["gpu_class"], boot, row["replica"], row["last_heard"])
        rows[boot] = Compared(Tokens(row["prompt_tokens"], row["generation_tokens"]), estimated_input=0)
    _bounded(keys)
    columns = (usage.c.engine_boot, usage.c.attempt, usage.c.count_source)
    tokens_in, tokens_out = func.coalesce(usage.c.input_tokens, 0), func.coalesce(usage.c.output_tokens, 0)
    query = (
        select(*columns, func.sum(tokens_in), func.sum(tokens_out))
        .where(usage.c.ended.is_(True), usage.c.engine_boot.in_(wanted.with_only_columns(engines.c.boot)))
        .group_by(*columns)
    )
    for row in connection.execute(query):
        boot, tokens, estimated = str(row[0]), Tokens(int(row[3]), int(row[4])), row[2] == "estimated"
        if row[1] == 0 and not estimated:
            rows[boot] += Compared(None, tokens)
        else:
            rows[boot] += Compared(None, Tokens(), tokens, tokens.input if estimated else 0)
    return {keys[boot]: row for boot, row in rows.items()}


def total(rows: Iterable[Compared]) -> Compared:
    """Totals of the rows. Engines without reports count as zero."""
    return sum(rows, Compared(None))


def _grouped(
    connection: Connection,
    table: Table,
    sums: Collection[ColumnElement[int]],
    span: Span,
    by: Collection[str],
    model: Collection[str],
    *where: ColumnElement[bool],
) -> Iterator[tuple[Key, list[int]]]:
    groups: dict[str, ColumnElement[Any]] = {}
    if "hour" in by:
        groups["at"] = table.c.hour
    elif "day" in by:
        groups["at"] = aggregation.day(table.c.hour)
    elif "month" in by:
        first, *later = [whole.start for _, whole in span.months()]
        groups["at"] = aggregation.periods(table.c.hour, first, later)
    if "model" in by:
        groups["model"] = table.c.model
    if "class" in by:
        groups["gpu_class"] = table.c.gpu_class
    inner = select(
        *(column.label(f"by_{name}") for name, column in groups.items()),
        *(column.label(f"sum_{number}") for number, column in enumerate(sums)),
    ).where(table.c.hour >= span.start, table.c.hour < span.end, *where)
    if model:
        inner = inner.where(table.c.model.in_(model))
    within = inner.subquery()
    keys = [within.c[f"by_{name}"] for name in groups]
    summed = [func.sum(within.c[f"sum_{number}"]) for number in range(len(sums))]
    query = select(*summed, *keys).group_by(*keys).limit(MOST_ROWS + 1)
    for row in connection.execute(query if keys else query.having(func.count() > 0)):
        yield Key(**dict(zip(groups, row[len(sums) :], strict=True))), [int(number) for number in row[: len(sums)]]


def _bounded(rows: Sized) -> None:
    if len(rows) > MOST_ROWS:
        raise TooMany
