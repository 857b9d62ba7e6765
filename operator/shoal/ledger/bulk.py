"""Statements for many rows, in the dialect of each database.

SQLite: `VALUES` with many rows, since each step of a prepared statement takes the GIL. PostgreSQL: for many rows COPY
into a temporary table, twice as fast as arrays with a quarter of the CPU; for few rows one array per column and
`unnest`, a third faster (tests/bench/bench_ledger.py).
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Final

from sqlalchemy import BigInteger, Boolean, Column, Connection, Float, Integer, LargeBinary, Row, Table

_MOST_VALUES: Final = 3_000
"""Values per statement in SQLite. It allows 32,766, but larger statements were not faster."""

COPY_FROM: Final = 100
"""Number of rows from which COPY is faster."""

MOST: Final = (1 << 63) - 1
"""Largest integer in a column or in JSON: 9.2 million of a currency in units of 10^-12."""

Values = Sequence[Any]


def insert(connection: Connection, table: Table, rows: Sequence[Values], conflict: str) -> list[Row[Any]]:
    """Inserts complete rows (all columns, in order). `conflict` is the rest of the statement, such as ON CONFLICT and
    RETURNING; returns its rows."""
    if not rows:
        return []
    if connection.dialect.name == "postgresql":
        if len(rows) >= COPY_FROM:
            return _copy(connection, table, rows, conflict)
        arrays = tuple(map(list, zip(*rows, strict=True)))
        return _run(connection, _insert_arrays(table, conflict), arrays)
    found: list[Row[Any]] = []
    for part in _parts(rows, len(table.columns)):
        statement = _insert_values(table, len(part), conflict)
        found += _run(connection, statement, tuple(value for row in part for value in row))
    return found


def select(connection: Connection, table: Table, columns: Sequence[str], keys: Sequence[Values]) -> list[Row[Any]]:
    """`columns` of the rows with these primary keys."""
    if not keys:
        return []
    if connection.dialect.name == "postgresql":
        return _run(connection, _select_arrays(table, tuple(columns)), tuple(map(list, zip(*keys, strict=True))))
    found: list[Row[Any]] = []
    for part in _parts(keys, len(keys[0])):
        statement = _select_values(table, tuple(columns), len(part))
        found += _run(connection, statement, tuple(value for key in part for value in key))
    return found


@cache
def replacing(table: Table) -> str:
    """ON CONFLICT clause that replaces the old row."""
    return _on_conflict(table, ", ".join(f"{name} = excluded.{name}" for name in _other_columns(table)))


@cache
def adding(table: Table, *, latest: tuple[str, ...] = (), bounded: tuple[str, ...] = ()) -> str:
    """ON CONFLICT clause that adds the numbers. Columns in `latest` keep the larger value. Columns in `bounded` stop at
    MOST, where SQLite would switch to floating point and PostgreSQL would refuse the row."""
    sets: list[str] = []
    for name in _other_columns(table):
        old, new = f"{table.name}.{name}", f"excluded.{name}"
        if name in latest:
            sets.append(f"{name} = CASE WHEN {new} > {old} THEN {new} ELSE {old} END")
        elif name in bounded:
            over = f"{new} > 0 AND {old} > {MOST} - {new}"
            sets.append(f"{name} = CASE WHEN {over} THEN {MOST} ELSE {old} + {new} END")
        else:
            sets.append(f"{name} = {old} + {new}")
    return _on_conflict(table, ", ".join(sets))


def _parts(rows: Sequence[Values], width: int) -> Iterator[Sequence[Values]]:
    """Splits rows into parts with power-of-two lengths: few distinct statements, so SQLite finds them prepared."""
    at, most = 0, 1 << max(0, (_MOST_VALUES // width).bit_length() - 1)
    while left := len(rows) - at:
        count = min(most, 1 << (left.bit_length() - 1))
        yield rows[at : at + count]
        at += count


def _on_conflict(table: Table, sets: str) -> str:
    return f"ON CONFLICT ({', '.join(_key(table))}) DO UPDATE SET {sets}"


def _run(connection: Connection, statement: str, values: tuple[Any, ...]) -> list[Row[Any]]:
    result = connection.exec_driver_sql(statement, values)
    return list(result.all()) if result.returns_rows else []


def _copy(connection: Connection, table: Table, rows: Sequence[Values], conflict: str) -> list[Row[Any]]:
    incoming, columns = f"incoming_{table.name}", _names(table)
    # With defaults: a newer version may have added columns that this version does not fill.
    like = f"LIKE {table.name} INCLUDING DEFAULTS"
    connection.exec_driver_sql(f"CREATE TEMPORARY TABLE IF NOT EXISTS {incoming} ({like})")
    connection.exec_driver_sql(f"TRUNCATE {incoming}")
    driver: Any = connection.connection.driver_connection
    with driver.cursor() as cursor, cursor.copy(f"COPY {incoming} ({columns}) FROM STDIN") as copy:
        for row in rows:
            copy.write_row(row)
    return _run(connection, f"INSERT INTO {table.name} ({columns}) SELECT {columns} FROM {incoming} {conflict}", ())  # noqa: S608


@cache
def _insert_arrays(table: Table, conflict: str) -> str:
    arrays = ", ".join(f"%s::{_type(column)}[]" for column in table.columns)
    return f"INSERT INTO {table.name} ({_names(table)}) SELECT * FROM unnest({arrays}) {conflict}"  # noqa: S608


@cache
def _insert_values(table: Table, rows: int, conflict: str) -> str:
    row = f"({', '.join('?' * len(table.columns))})"
    return f"INSERT INTO {table.name} ({_names(table)}) VALUES {', '.join([row] * rows)} {conflict}"  # noqa: S608


@cache
def _select_arrays(table: Table, columns: tuple[str, ...]) -> str:
    key = _key(table)
    arrays = ", ".join(f"%s::{_type(table.columns[name])}[]" for name in key)
    return (
        f"SELECT {', '.join(f't.{name}' for name in columns)} FROM unnest({arrays}) AS k({', '.join(key)})"  # noqa: S608
        f" JOIN {table.name} t ON {' AND '.join(f't.{name} = k.{name}' for name in key)}"
    )


@cache
def _select_values(table: Table, columns: tuple[str, ...], rows: int) -> str:
    key = _key(table)
    row = f"({', '.join('?' * len(key))})"
    # CROSS JOIN makes SQLite look up each key rather than scan the table.
    return (
        f"WITH k({', '.join(key)}) AS (VALUES {', '.join([row] * rows)})"  # noqa: S608
        f" SELECT {', '.join(f't.{name}' for name in columns)} FROM k CROSS JOIN {table.name} t"
        f" WHERE {' AND '.join(f't.{name} = k.{name}' for name in key)}"
    )


def _names(table: Table) -> str:
    return ", ".join(column.name for column in table.columns)


def _key(table: Table) -> list[str]:
    return [column.name for column in table.primary_key.columns]


def _other_columns(table: Table) -> list[str]:
    key = set(_key(table))
    return [column.name for column in table.columns if column.name not in key]


def _type(column: Column[Any]) -> str:
    match column.type:
        case Boolean():
            return "boolean"
        case BigInteger():
            return "bigint"
        case Integer():
            return "integer"
        case Float():
            return "double precision"
        case LargeBinary():
            return "bytea"
        case _:
            return "text"
