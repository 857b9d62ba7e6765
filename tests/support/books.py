"""The ledger's tables in a file of SQLite, without its store: for tests of what is written and asked."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Table, create_engine, select

from shoal.ledger.schema import metadata


class Books:
    """Each `begin` is a connection of its own, as after a restart."""

    def __init__(self, folder: Path) -> None:
        self._engine = create_engine(f"sqlite:///{folder}/books.sqlite")
        metadata.create_all(self._engine)

    @contextmanager
    def begin(self) -> Generator[Connection]:
        with self._engine.begin() as connection:
            yield connection

    def rows(self, table: Table) -> list[dict[str, Any]]:
        """All of a table, by its primary key."""
        with self._engine.begin() as connection:
            query = select(table).order_by(*table.primary_key.columns)
            return [dict(row) for row in connection.execute(query).mappings()]

    def add(self, table: Table, **values: Any) -> None:
        """One row; what is not given is 0, False or ''."""
        empty: dict[type, Any] = {int: 0, float: 0.0, bool: False, str: ""}
        row = {c.name: empty[c.type.python_type] for c in table.columns if not c.nullable} | values
        with self._engine.begin() as connection:
            connection.execute(table.insert(), row)

    def close(self) -> None:
        self._engine.dispose()
