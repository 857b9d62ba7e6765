"""The two supported databases: opening, locking, migrating.

SQLite: one file in WAL mode with synchronous=FULL, so that an acknowledged commit survives a crash of the node; a lock
file beside it excludes a second ledger. PostgreSQL: an advisory lock in the writer's session; a second ledger is on
standby until that session ends.
"""

import contextlib
import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import structlog
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool, QueuePool

if TYPE_CHECKING:
    from alembic.config import Config

log = structlog.get_logger()

Kind = Literal["sqlite", "postgresql"]

CONNECT_SECONDS: Final = 5
STATEMENT_SECONDS: Final = 60
"""Statement timeout of the writer and of queries; migrations have none."""
_STEPS: Final = 200_000
"""Steps of SQLite's virtual machine between two checks of the timeout: a few milliseconds."""
_LOCK: Final = 0x73686F616C  # "shoal"
_MIGRATIONS: Final = Path(__file__).parent / "migrations"
OLDEST: Final = "_from_"
"""Separator in the name of a revision, followed by the oldest revision whose ledger can still write the tables:
0002_from_0001 adds only what older ledgers may ignore, such as a column with a default. A release can then be rolled
back without restoring data."""


class DatabaseUnavailable(Exception):
    """The database is unavailable. The message says why."""


class Busy(DatabaseUnavailable):
    """Another ledger uses this database."""


class Database:
    """The ledger's database; `url` as in `LedgerSettings.database_url`."""

    def __init__(self, url: str, *, readers: int = 4) -> None:
        self.url: Final = make_url(url)
        self.kind: Final[Kind] = "sqlite" if self.url.drivername == "sqlite" else "postgresql"
        self.name: Final = self.url.render_as_string(hide_password=True)
        self._writing = self._engine(writes=True)
        self.reading: Final = self._engine(writes=False, size=readers)
        """Engine for queries, with `readers` connections."""

    @property
    def path(self) -> Path:
        """The SQLite file."""
        return Path(self.url.database or "")

    def open(self, stack: contextlib.ExitStack) -> Connection:
        """Opens the writer's connection, locked against other ledgers and migrated. `stack` closes everything.

        Raises:
            Busy: another ledger uses the database.
            DatabaseUnavailable: another error, such as a full disk or an unreachable server.
        """
        try:
            if self.kind == "sqlite":
                self.path.parent.mkdir(parents=True, exist_ok=True)
                stack.callback(os.close, lock_file(self.path))
            connection = stack.enter_context(self._writing.connect())
            if self.kind == "postgresql":
                with connection.begin():
                    got = connection.exec_driver_sql("SELECT pg_try_advisory_lock(%s)", (_LOCK,)).scalar()
                if not got:
                    raise Busy(f"another ledger writes to {self.name}: this one stands by")
            migrate(connection)
            return connection
        except (DBAPIError, OSError) as error:
            raise DatabaseUnavailable(reason(error)) from error

    def close(self) -> None:
        """Closes all connections."""
        self.reading.dispose()
        self._writing.dispose()

    def _engine(self, *, writes: bool, size: int = 1) -> Engine:
        pool: dict[str, Any] = (
            {"poolclass": NullPool}
            if writes
            else {"poolclass": QueuePool, "pool_size": size, "max_overflow": 0, "pool_pre_ping": True}
        )
        if self.kind == "postgresql":
            options = f"-c statement_timeout={STATEMENT_SECONDS * 1000} -c timezone=UTC"
            if not writes:
                options += " -c default_transaction_read_only=on"
            arguments: dict[str, Any] = {
                "connect_timeout": CONNECT_SECONDS,
                "options": options,
                "application_name": "shoal-ledger",
                # A server that disappears silently is noticed within seconds, not after the kernel's 15 minutes.
                "keepalives_idle": 10,
                "keepalives_interval": 5,
                "keepalives_count": 3,
                "tcp_user_timeout": 20_000,
            }
            return create_engine(self.url, connect_args=arguments, **pool)
        engine = create_engine(self.url, connect_args={"timeout": 10, "check_same_thread": False}, **pool)
        event.listen(engine, "connect", _set_up_writer if writes else _set_up_reader)
        event.listen(engine, "begin", _begin_writer if writes else _begin_reader)
        return engine


def lock_file(path: Path) -> int:
    """Locks the SQLite database `path`. Closing the returned descriptor releases the lock.

    Raises:
        Busy: a ledger uses the database.
    """
    lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise Busy(f"another ledger uses {path}: end it first, or give this one a file of its own") from None
    return lock


def _set_up_writer(connection: sqlite3.Connection, _: object) -> None:
    connection.isolation_level = None
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA wal_autocheckpoint=8000")
    connection.execute("PRAGMA journal_size_limit=268435456")
    connection.execute("PRAGMA cache_size=-131072")
    connection.execute("PRAGMA temp_store=MEMORY")


def _set_up_reader(connection: sqlite3.Connection, _: object) -> None:
    connection.isolation_level = None
    connection.execute("PRAGMA query_only=ON")
    connection.execute("PRAGMA cache_size=-32768")
    connection.execute("PRAGMA temp_store=MEMORY")


def _begin_writer(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _begin_reader(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN")


@contextlib.contextmanager
def bounded(connection: Connection) -> Generator[None]:
    """Applies STATEMENT_SECONDS to statements in the body, so that an expensive query does not occupy a reader for
    ever. (PostgreSQL does this itself.)"""
    driver = connection.connection.driver_connection
    if not isinstance(driver, sqlite3.Connection):
        yield
        return
    ends = time.monotonic() + STATEMENT_SECONDS
    driver.set_progress_handler(lambda: time.monotonic() > ends, _STEPS)
    try:
        yield
    finally:
        driver.set_progress_handler(None, 0)


def migrate(connection: Connection) -> None:
    """Migrates the tables to this version in one transaction. Tables of a newer version are left unchanged; raises
    DatabaseUnavailable if this version cannot write them."""
    logging.getLogger("alembic").setLevel(logging.WARNING)  # it logs its plugins on import
    import alembic.command
    from alembic.config import Config
    from alembic.util.exc import CommandError

    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    config.attributes["connection"] = connection
    began = time.monotonic()
    try:
        with connection.begin():
            if connection.dialect.name == "postgresql":
                connection.exec_driver_sql("SET LOCAL statement_timeout = 0")
            alembic.command.upgrade(config, "head")
    except CommandError as error:
        if (newer := _newer_that_takes(connection, config)) is not None:
            log.warning("a newer ledger made the tables; this one goes on with them", version=newer)
            return
        raise DatabaseUnavailable(
            f"the database's tables are not of this version: {error}; a newer ledger made them: run that one, or "
            "restore a backup from before it"
        ) from error
    log.debug("tables are of this version", seconds=round(time.monotonic() - began, 3))


def _newer_that_takes(connection: Connection, config: "Config") -> str | None:
    """A newer table version that this ledger can nevertheless write, according to its name; None: it cannot."""
    from alembic.script import ScriptDirectory

    with connection.begin():
        version = str(connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar())
    _, named, oldest = version.rpartition(OLDEST)
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    return version if named and oldest in known else None


def reason(error: BaseException) -> str:
    """The cause of an error in one line, without statements and values."""
    origin = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    lines = str(origin).strip().splitlines() or [type(origin).__name__]
    return f"the database: {lines[0]}"
