"""The ledger's tables in a database, without its store: for tests of what is written and asked."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Table, create_engine, select
from sqlalchemy.pool import NullPool

from shoal.ledger.schema import metadata


class LedgerTables:
    """Tables in the empty database at `url`. Each `begin` is a connection of its own, as after a restart."""

    def __init__(self, url: str) -> None:
        self._engine = create_engine(url, poolclass=NullPool)
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
