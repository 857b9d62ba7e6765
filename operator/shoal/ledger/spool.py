"""The spool: usage records on the gateway's own disk until somebody has taken them.

SQLite in WAL mode with synchronous=FULL: a row that was acknowledged survives the death of the process and of the node.
One thread writes; whatever arrives while a commit is under way goes into the next one (group commit), so the number of
syncs does not grow with the load. At start, rows `open` without a `final` are those of a gateway that was killed: they
get a final row with outcome `cut` and the counts of their last checkpoint.
"""

import asyncio
import contextlib
import fcntl
import functools
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import orjson
import structlog

from shoal.api.usage import RecordKind, UsageRecord

log = structlog.get_logger()

FILE_NAME: Final = "spool.sqlite"
_RETRY_SECONDS: Final = 1.0
_MAX_KEPT_ROWS: Final = 200_000
"""Rows kept in memory while the disk refuses them. Beyond that the oldest are dropped and counted."""

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS records (
  seq INTEGER PRIMARY KEY AUTOINCREMENT,
  id TEXT NOT NULL UNIQUE,
  request TEXT NOT NULL,
  kind TEXT NOT NULL,
  body BLOB NOT NULL,
  shipped INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS probe (one INTEGER PRIMARY KEY CHECK (one = 1), at REAL NOT NULL);
"""
_INSERT: Final = "INSERT OR IGNORE INTO records (id, request, kind, body) VALUES (?, ?, ?, ?)"
_MOST_ROWS: Final = 64
"""Rows per statement."""
STUCK_SECONDS: Final = 10.0
"""After so long a commit that does not return counts as a disk that does not work."""

Row = tuple[str, str, RecordKind, bytes]
"""(id, request id, kind, record as JSON)."""


class SpoolUnavailable(Exception):
    """Nothing can be kept: the disk is full, read-only or gone. The message says which."""


GROUP_SECONDS: Final = 0.002
"""How long the writer lets rows gather while many wait. Each commit costs CPU of the core that the event loop runs on:
with 64 requests at a time this made the gateway a third faster, and the rows' own wait shorter, not longer."""
CROWD: Final = 4
"""Waiting rows in one commit from which on the next one gathers; below it a row is written at once."""


@dataclass(slots=True)
class SpoolStats:
    """Monotonic counters, read by the metrics."""

    rows: int = 0
    commits: int = 0
    failures: int = 0
    dropped: int = 0
    closed_as_cut: int = 0


@dataclass(slots=True)
class _Batch:
    rows: list[Row] = field(default_factory=list[Row])
    waiting: list[tuple[Row, asyncio.Future[None]]] = field(default_factory=list[tuple[Row, asyncio.Future[None]]])
    flushes: list[asyncio.Future[None]] = field(default_factory=list[asyncio.Future[None]])

    def __bool__(self) -> bool:
        return bool(self.rows or self.waiting or self.flushes)


class Spool:
    """Make and use it in one event loop. `start` returns at once; the writer thread opens the file, again and again."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE_NAME
        self.stats = SpoolStats()
        self._error: str | None = "the spool is being opened"
        self._pending = _Batch()
        self._kept: list[Row] = []
        # The event loop takes the bare lock: a condition's own `with` is Python, and costs four times as much.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._sleeping = False
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._loop = asyncio.get_running_loop()
        self._opened: asyncio.Event = asyncio.Event()
        self._writing: tuple[float, _Batch] | None = None

    @property
    def error(self) -> str | None:
        """Why nothing can be kept; None while all is well."""
        return self._error

    @property
    def backlog(self) -> int:
        """Rows that are not on disk yet."""
        return len(self._pending.rows) + len(self._pending.waiting) + len(self._kept)

    def start(self) -> None:
        """Starts the writer thread."""
        self._thread = threading.Thread(target=self._run, name="spool", daemon=True)
        self._thread.start()

    async def opened(self) -> None:
        """Waits until the file was opened once (and what a killed gateway left was closed)."""
        await self._opened.wait()

    def commit(self, row: Row) -> asyncio.Future[None]:
        """A future that is done when the row is on disk.

        Raises:
            SpoolUnavailable: at once or through the future; then the row is not kept.
        """
        if self._error is not None:
            raise SpoolUnavailable(self._error)
        future: asyncio.Future[None] = self._loop.create_future()
        with self._lock:
            self._pending.waiting.append((row, future))
            if self._sleeping:
                self._changed.notify()
        return future

    def put(self, row: Row) -> None:
        """Keeps the row with the next commit. Never blocks and never raises: for final rows, in a `finally`."""
        with self._lock:
            self._pending.rows.append(row)
            if self._sleeping:
                self._changed.notify()

    async def flush(self) -> None:
        """Returns when all that was put before is on disk.

        Raises:
            SpoolUnavailable: the disk refuses.
        """
        future: asyncio.Future[None] = self._loop.create_future()
        with self._changed:
            self._pending.flushes.append(future)
            self._changed.notify()
        await future

    def check(self) -> None:
        """Refuses what has waited too long for the disk; call it about once a second."""
        writing = self._writing
        if writing is None or time.monotonic() - writing[0] < STUCK_SECONDS:
            return
        self._error = f"the disk has not answered for {STUCK_SECONDS:g} s"
        with self._changed:
            waiting, self._pending.waiting = self._pending.waiting, []
        error = SpoolUnavailable(self._error)
        _reject([future for _, future in (*waiting, *writing[1].waiting)], error)

    async def stop(self) -> None:
        """Writes what is left and closes the file."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    # --- the writer thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with contextlib.ExitStack() as stack:
            connection: sqlite3.Connection | None = None
            crowded = False
            while True:
                if connection is None:
                    try:
                        connection = self._open(stack)
                    except (OSError, sqlite3.Error) as error:
                        self._fail(error)
                        if self._wait_retry():
                            self._refuse(self._take())
                            return
                        self._refuse(self._take())
                        continue
                    self._notify(self._opened.set)
                if crowded:
                    time.sleep(GROUP_SECONDS)
                batch = self._take()
                crowded = len(batch.waiting) >= CROWD
                if not batch and not (self._error and self._kept):
                    if self._stopping and not self._error:
                        return
                    if self._error is None and self._wait_work():
                        continue
                try:
                    self._writing = (time.monotonic(), batch)
                    self._write(connection, batch)
                except (OSError, sqlite3.Error) as error:
                    self._writing = None
                    with contextlib.suppress(sqlite3.Error):
                        connection.rollback()
                    self._fail(error)
                    self._keep(batch)
                    self._refuse(batch)
                    if self._wait_retry():
                        log.error("usage records are lost: the spool did not take them", rows=self.backlog)
                        return
                else:
                    self._writing = None
                    self._acknowledge(batch)

    def _open(self, stack: contextlib.ExitStack) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            # Two writers would close each other's open rows as cut.
            raise OSError(f"another gateway uses the spool {self.path}") from None
        try:
            connection = sqlite3.connect(self.path, isolation_level=None, timeout=10, cached_statements=_MOST_ROWS + 16)
        except BaseException:
            os.close(lock)
            raise
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute("PRAGMA wal_autocheckpoint=8000")
            connection.executescript(_SCHEMA)
            self.stats.closed_as_cut += _close_open_rows(connection)
        except BaseException:
            connection.close()
            os.close(lock)
            raise
        stack.callback(os.close, lock)
        stack.callback(connection.close)
        self._error = None
        return connection

    def _write(self, connection: sqlite3.Connection, batch: _Batch) -> None:
        rows = [*self._kept, *batch.rows, *(row for row, _ in batch.waiting)]
        # One statement for many rows: sqlite3 gives up and takes back the GIL at each step, and takes it from a loop
        # that is busy. A batch that fits into one statement needs no transaction around it either.
        if 0 < len(rows) <= _MOST_ROWS:
            connection.execute(_insert(len(rows)), [value for row in rows for value in row])
            self._written(len(rows))
            return
        connection.execute("BEGIN IMMEDIATE")
        if rows:
            for at in range(0, len(rows), _MOST_ROWS):
                part = rows[at : at + _MOST_ROWS]
                connection.execute(_insert(len(part)), [value for row in part for value in row])
        elif self._error is not None:
            # Nothing to write, but we must find out whether the disk takes rows again.
            connection.execute("INSERT OR REPLACE INTO probe VALUES (1, ?)", (time.time(),))
        connection.execute("COMMIT")
        self._written(len(rows))

    def _written(self, rows: int) -> None:
        self.stats.rows += rows
        self.stats.commits += 1
        if self._error is not None:
            log.info("the spool takes records again", path=str(self.path))
            self._error = None
        self._kept = []

    def _take(self) -> _Batch:
        with self._changed:
            batch, self._pending = self._pending, _Batch()
            return batch

    def _keep(self, batch: _Batch) -> None:
        self._kept.extend(batch.rows)
        if (extra := len(self._kept) - _MAX_KEPT_ROWS) > 0:
            del self._kept[:extra]
            self.stats.dropped += extra

    def _fail(self, error: Exception) -> None:
        self.stats.failures += 1
        text = str(error)
        if self._error != text:
            log.error("the spool cannot keep records", path=str(self.path), error=text)
        self._error = text

    def _acknowledge(self, batch: _Batch) -> None:
        if futures := [*(future for _, future in batch.waiting), *batch.flushes]:
            self._notify(_resolve, futures)

    def _refuse(self, batch: _Batch) -> None:
        if futures := [*(future for _, future in batch.waiting), *batch.flushes]:
            self._notify(_reject, futures, SpoolUnavailable(self._error or "the spool is closed"))

    def _notify(self, function: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(function, *args)

    def _wait_work(self) -> bool:
        with self._changed:
            if not self._pending and not self._stopping:
                self._sleeping = True
                self._changed.wait()
                self._sleeping = False
            return True

    def _wait_retry(self) -> bool:
        """Waits before the next try; True when the process stops and must not wait for the disk."""
        with self._changed:
            if not self._stopping:
                self._changed.wait_for(lambda: self._stopping, _RETRY_SECONDS)
            return self._stopping


@functools.cache
def _insert(rows: int) -> str:
    return f"{_INSERT}{', (?, ?, ?, ?)' * (rows - 1)}"


def _resolve(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


def _reject(futures: list[asyncio.Future[None]], error: Exception) -> None:
    for future in futures:
        if not future.done():
            future.set_exception(error)


def _close_open_rows(connection: sqlite3.Connection) -> int:
    """Gives each open row that has no final one a final row with outcome `cut`; returns how many."""
    rows = connection.execute(
        "SELECT o.request, coalesce((SELECT c.body FROM records c WHERE c.id > o.request || ':checkpoint:'"
        " AND c.id < o.request || ':checkpoint;' ORDER BY c.seq DESC LIMIT 1), o.body)"
        " FROM records o WHERE o.kind = 'open'"
        " AND NOT EXISTS (SELECT 1 FROM records f WHERE f.id = o.request || ':final')"
    ).fetchall()
    connection.execute("BEGIN IMMEDIATE")
    for request, body in rows:
        record = UsageRecord.model_validate_json(body)
        final = record.model_copy(
            update={
                "id": f"{request}:final",
                "time": datetime.now(UTC),
                "data": record.data.model_copy(update={"kind": "final", "outcome": "cut"}),
            }
        )
        connection.execute(_INSERT, (final.id, request, "final", final.model_dump_json(by_alias=True).encode()))
    connection.execute("COMMIT")
    if rows:
        log.warning("closed the records of requests that a killed gateway held", requests=len(rows))
    return len(rows)


# --- reading --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SpooledRecord:
    seq: int
    kind: str
    shipped: bool
    record: UsageRecord


class SpoolReader:
    """Reads a spool, also while a gateway writes it.

    Raises:
        FileNotFoundError: there is no spool.
    """

    def __init__(self, path: Path) -> None:
        file = path / FILE_NAME if path.is_dir() else path
        if not file.exists():
            raise FileNotFoundError(f"no spool at {file}")
        self._connection = sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True, timeout=10)

    def close(self) -> None:
        self._connection.close()

    def last_seq(self) -> int:
        """The newest row's number; 0 in an empty spool."""
        return self._connection.execute("SELECT coalesce(max(seq), 0) FROM records").fetchone()[0]

    def newest(
        self, limit: int, request: str | None = None, *, kinds: Sequence[str] | None = None
    ) -> list[SpooledRecord]:
        """The newest `limit` rows, oldest first; with `request` those of that request id (ours or the client's own),
        with `kinds` those kinds only."""
        where, values = ["1"], list[str | int]()
        if request is not None:
            where.append("(request = ? OR json_extract(CAST(body AS TEXT), '$.data.clientRequestId') = ?)")
            values += [request, request]
        if kinds is not None:
            where.append(f"kind IN ({', '.join('?' * len(kinds))})")
            values += kinds
        rows = self._connection.execute(
            f"SELECT seq, kind, shipped, body FROM records WHERE {' AND '.join(where)} ORDER BY seq DESC LIMIT ?",  # noqa: S608 - only placeholders
            [*values, limit],
        ).fetchall()
        return [_spooled(row) for row in reversed(rows)]

    def after(self, seq: int) -> Iterator[SpooledRecord]:
        """Rows that came after `seq`."""
        cursor = self._connection.execute(
            "SELECT seq, kind, shipped, body FROM records WHERE seq > ? ORDER BY seq", (seq,)
        )
        return map(_spooled, cursor.fetchall())


def _spooled(row: tuple[int, str, int, bytes]) -> SpooledRecord:
    seq, kind, shipped, body = row
    return SpooledRecord(seq, kind, bool(shipped), UsageRecord.model_validate(orjson.loads(body)))
