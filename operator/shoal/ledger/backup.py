"""Backup and restore of a SQLite ledger."""

import contextlib
import os
import sqlite3
from pathlib import Path
from typing import Final

from shoal.ledger.database import lock_file

_PAGES: Final = 2_000
"""Pages copied per step: 8 MiB."""
_PARTS: Final = ("", "-wal", "-shm")


class BackupError(Exception):
    """The operation failed and changed nothing. The message says why."""


def backup(database: Path, target: Path) -> str:
    """Copies the database to a new file in one consistent state, also while a ledger writes; returns a description.

    Raises:
        BackupError: there is no database, the file exists already, or the disk is full.
    """
    if not database.is_file():
        raise BackupError(f"no database at {database}")
    if target.exists():
        raise BackupError(f"{target} is there already: give another name")
    part = target.with_name(f".{target.name}.part")
    try:
        with (
            contextlib.closing(
                sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True, timeout=30)
            ) as source,
            contextlib.closing(sqlite3.connect(part)) as copy,
        ):
            # Within a read transaction: otherwise each commit of the ledger would restart the copy.
            source.execute("BEGIN")
            source.execute("SELECT count(*) FROM sqlite_master").fetchone()
            source.backup(copy, pages=_PAGES)
            copy.execute("PRAGMA journal_mode=DELETE")
        _check_database(part)
        _sync(part)
        os.replace(part, target)
        _sync(target.parent)
    except (sqlite3.Error, OSError) as error:
        raise BackupError(f"the backup failed: {error}") from error
    finally:
        part.unlink(missing_ok=True)
    return f"copied {database} to {target}: {target.stat().st_size} bytes"


def restore(database: Path, source: Path, *, force: bool = False) -> str:
    """Replaces the database with a backup; returns a description. The old database is kept as *.before.

    Raises:
        BackupError: the file is not a ledger's database, or a database exists and `force` is not given.
        Busy: a ledger is running.
    """
    try:
        database.parent.mkdir(parents=True, exist_ok=True)
        lock = lock_file(database)
        try:
            if database.exists() and not force:
                raise BackupError(f"{database} is there already: --force keeps it as {database.name}.before")
            _check_database(source)
            part = database.with_name(f".{database.name}.part")
            try:
                with (
                    contextlib.closing(sqlite3.connect(f"{source.resolve().as_uri()}?mode=ro", uri=True)) as given,
                    contextlib.closing(sqlite3.connect(part)) as copy,
                ):
                    given.backup(copy, pages=_PAGES)
                _sync(part)
                for suffix in reversed(_PARTS):
                    old = database.with_name(database.name + suffix)
                    if old.exists():
                        os.replace(old, database.with_name(f"{database.name}.before{suffix}"))
                os.replace(part, database)
                _sync(database.parent)
            finally:
                part.unlink(missing_ok=True)
        finally:
            os.close(lock)
    except (sqlite3.Error, OSError) as error:
        raise BackupError(f"the restore failed: {error}") from error
    return f"put {source} in place of {database}: {database.stat().st_size} bytes"


def _check_database(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        try:
            found = connection.execute("PRAGMA quick_check").fetchone()[0]
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        except sqlite3.Error as error:
            raise BackupError(f"{path} is not a sound SQLite database: {error}") from None
    if found != "ok":
        raise BackupError(f"{path} is damaged: {found}")
    if not {"alembic_version", "records", "usage", "hours"} <= tables:
        raise BackupError(f"{path} is not a ledger's database")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
