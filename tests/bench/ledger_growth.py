"""A ledger of any size within minutes: what was sent to it once is copied by the database itself, later in time each
time, under request ids of its own, with its sums."""

import contextlib
import time
from collections.abc import Callable
from typing import Any, Final

from sqlalchemy import Connection

from shoal.ledger import bulk, schema
from shoal.ledger.database import Database

PART: Final = 100_000
"""Requests of one copy."""
_HOUR_MS: Final = 3_600_000


def grow(url: str, requests: int, span_ms: int) -> float:
    """Brings a ledger that has PART requests or more, over some time from `span_ms` ago on, to so many over all of that
    time. No ledger may run. Returns seconds."""
    database = Database(url)
    began = time.monotonic()
    try:
        with contextlib.ExitStack() as stack:
            connection = database.open(stack)
            if database.kind == "sqlite":
                driver: Any = connection.connection.driver_connection  # SQLAlchemy would begin a transaction first
                for setting in ("synchronous=OFF", "cache_size=-1048576"):
                    driver.execute(f"PRAGMA {setting}")
            else:
                with connection.begin():
                    connection.exec_driver_sql("SET synchronous_commit = off")
                    connection.exec_driver_sql("SET statement_timeout = 0")
            _copy(connection, requests, span_ms, hexadecimal(database.kind))
            with connection.begin():
                connection.exec_driver_sql("DROP TABLE sample")
                if database.kind != "sqlite":
                    connection.exec_driver_sql("ANALYZE")  # autovacuum would have, over the days that this stands for
    finally:
        database.close()
    return time.monotonic() - began


def hexadecimal(kind: str) -> Callable[[str, int], str]:
    """A number as hexadecimal of so many digits, in SQL."""
    if kind == "sqlite":
        return lambda number, digits: f"printf('%0{digits}x', {number})"
    return lambda number, digits: f"lpad(to_hex({number}), {digits}, '0')"


def _copy(connection: Connection, requests: int, span_ms: int, hexa: Callable[[str, int], str]) -> None:
    run: Any = connection.exec_driver_sql
    with connection.begin():
        names = ", ".join(column.name for column in schema.usage.columns)
        run(
            f"CREATE TEMPORARY TABLE sample AS SELECT row_number() OVER (ORDER BY request) AS n, {names}"  # noqa: S608
            f" FROM usage WHERE attempt = 0 AND ended ORDER BY request LIMIT {PART}"
        )
        taken, first = run("SELECT count(*), min(admitted_at) FROM sample").one()
        there = run("SELECT count(*) FROM usage").scalar()
    if taken < PART:
        raise RuntimeError(f"the ledger has {taken} requests, {PART} are needed to copy")
    step = span_ms // requests
    for copy in range((requests - there) // PART):
        # Later than all that was sent, in the order of their ids, as requests come.
        number = f"({there + copy * PART} + n + 268435456)"
        request = f"'0193' || {hexa(number, 8)} || '-7abc-8def-' || {hexa(number, 12)}"
        admitted = f"({first} + ({there + copy * PART} + n) * {step})"
        given = {"request": request, "admitted_at": admitted, "received_at": f"{admitted} + 2000"}
        with connection.begin():
            wanted = ", ".join(given.get(column.name, column.name) for column in schema.usage.columns)
            run(f"INSERT INTO usage SELECT {wanted} FROM sample")  # noqa: S608
            run(
                f"INSERT INTO records SELECT s.source, {request} || ':final', {request}, 'final', {admitted} + 2000,"  # noqa: S608
                " r.body FROM sample s JOIN records r ON r.source = s.source AND r.id = s.request || ':final'"
            )
            hour = f"{admitted} / {_HOUR_MS} * {_HOUR_MS}"
            texts = ("external_id", "plan", "adapter", "gpu_class")
            keys = {name: f"coalesce({name}, '')" for name in texts} | {"hour": hour, "billed": "true"}
            sums = {"requests": "count(*)", "reasoning_tokens": "sum(coalesce(reasoning_tokens, 0))"}
            sums |= {name: f"sum(coalesce({name}, 0))" for name in ("input_tokens", "output_tokens")}
            sums |= {"cached_tokens": "sum(coalesce(cached_tokens, 0))"}
            sums |= {"unknown_cached_input": "0", "unknown_requests": "0", "estimated_input": "0"}
            units = ("documents", "images", "audio_ms", "image_tokens", "audio_tokens", "accepted_tokens")
            sums |= {name: f"sum(coalesce({name}, 0))" for name in units}
            columns = [column.name for column in schema.hours.columns]
            wanted = ", ".join(sums.get(name) or keys.get(name, name) for name in columns)
            groups = ", ".join(str(at) for at, name in enumerate(columns, 1) if name not in sums)
            run(
                f"INSERT INTO hours SELECT {wanted} FROM sample WHERE true GROUP BY {groups}"  # noqa: S608
                f" {bulk.adding(schema.hours)}"
            )
