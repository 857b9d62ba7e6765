"""What the ledger does by itself costs as much as there is to do, not as much as there ever was."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, event

from shoal.ledger import maintenance, schema
from shoal.ledger.database import Database
from shoal.ledger.sums import free


@contextlib.contextmanager
def plans(path: Path) -> Any:
    """A SQLite ledger's connection, and how SQLite carries out each statement that is run on it."""
    found: list[str] = []
    database = Database(f"sqlite:///{path}/ledger.sqlite")
    with contextlib.ExitStack() as stack:
        stack.callback(database.close)
        connection = database.open(stack)

        def explain(conn: Connection, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
            driver: Any = conn.connection.driver_connection
            if statement.startswith(("SELECT", "DELETE")):
                found.extend(row[3] for row in driver.execute(f"EXPLAIN QUERY PLAN {statement}", parameters))

        event.listen(connection, "before_cursor_execute", explain)
        with connection.begin():
            yield connection, found


def test_open_requests_are_found_without_reading_those_that_have_ended(tmp_path: Path) -> None:
    with plans(tmp_path) as (connection, found):
        maintenance._open_rows(connection)
        maintenance._close(connection, "boot", free)
        assert found == ["SCAN usage USING INDEX usage_open", "SEARCH usage USING INDEX usage_open (gateway=?)"]


@pytest.mark.parametrize(
    ("table", "column", "index"),
    [
        (schema.records, schema.records.c.received_at, "records_received_at (received_at<?)"),
        (schema.usage, schema.usage.c.admitted_at, "usage_time (admitted_at<?)"),
        (schema.hours, schema.hours.c.hour, "sqlite_autoindex_hours_1 (hour<?)"),
    ],
)
def test_what_is_old_is_found_without_reading_what_is_not(tmp_path: Path, table: Any, column: Any, index: str) -> None:
    with plans(tmp_path) as (connection, found):
        maintenance._delete(connection, table, column, 1)
        assert any(index in step for step in found)
        assert not [step for step in found if step.startswith("SCAN")]
