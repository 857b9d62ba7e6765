"""The spool's file: its tables, how it is opened, how much room it may take, and what is taken away again.

Rows are shipped in the order of `seq`, so that one number says which are: `position.shipped`.
"""

import fcntl
import functools
import os
import sqlite3
import time
from collections import deque
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import orjson
import structlog

from shoal.api.usage import RecordKind

log = structlog.get_logger()

FILE_NAME: Final = "spool.sqlite"
MOST_ROWS: Final = 64
"""Rows per statement."""
MOST_BYTES: Final = 1536 * 1024 * 1024
"""What the spool may take where nothing else is set."""
_SHARE_OF_VOLUME: Final = 0.8
"""The rest is for the write-ahead log, and for what else is there."""
_SLICE: Final = 512
"""Rows taken away at a time: it keeps the writer from new ones for a few milliseconds."""

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS records (
  seq INTEGER PRIMARY KEY AUTOINCREMENT,
  id TEXT NOT NULL UNIQUE,
  request TEXT NOT NULL,
  kind TEXT NOT NULL,
  body BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS probe (one INTEGER PRIMARY KEY CHECK (one = 1), at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS position (one INTEGER PRIMARY KEY CHECK (one = 1), shipped INTEGER NOT NULL);
INSERT OR IGNORE INTO position VALUES (1, 0);
CREATE INDEX IF NOT EXISTS open_rows ON records (request) WHERE kind = 'open';
"""
# open_rows: a start asks for open rows alone. Of a spool that holds all that a quarter of an hour, or a ledger that is
# away, makes of it, everything else would have to be read as well before the first request can be taken.
OPEN_ROWS: Final = (
    "SELECT o.request, coalesce((SELECT c.body FROM records c WHERE c.id > o.request || ':checkpoint:'"
    " AND c.id < o.request || ':checkpoint;' ORDER BY c.seq DESC LIMIT 1), o.body)"
    " FROM records o INDEXED BY open_rows WHERE o.kind = 'open'"
    " AND NOT EXISTS (SELECT 1 FROM records f WHERE f.id = o.request || ':final')"
)
"""Requests without an end, each with its last checkpoint, or with its open row."""
_INSERT: Final = "INSERT OR IGNORE INTO records (id, request, kind, body) VALUES (?, ?, ?, ?)"

Row = tuple[str, str, RecordKind, bytes]
"""(id, request id, kind, record as JSON)."""


class SpoolFile:
    """The file while one writer has it.

    Raises:
        OSError: it cannot be opened, or another gateway has it.
        sqlite3.Error: it is no spool, or the disk refuses.
    """

    def __init__(self, path: Path, max_bytes: int | None, keep_seconds: float) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            # Two writers would close each other's open rows as cut.
            raise OSError(f"another gateway uses the spool {path}") from None
        try:
            self.connection = sqlite3.connect(path, isolation_level=None, timeout=10, cached_statements=MOST_ROWS + 32)
        except BaseException:
            os.close(self._lock)
            raise
        try:
            self._prepare(path, max_bytes)
            self.tidy = Tidy(self.connection, keep_seconds)
        except BaseException:
            self.close()
            raise

    def _prepare(self, path: Path, max_bytes: int | None) -> None:
        volume = os.statvfs(path.parent)
        self.limit = min(max_bytes or MOST_BYTES, int(volume.f_blocks * volume.f_frsize * _SHARE_OF_VOLUME))
        """Bytes that the file may have; beyond it SQLite says that it is full."""
        connection = self.connection
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        self._page: int = connection.execute("PRAGMA page_size").fetchone()[0]
        connection.execute(f"PRAGMA wal_autocheckpoint={max(100, min(8000, self.limit // 8 // self._page))}")
        # Before the bound: the index of a full spool that an older version made must have its room too.
        connection.executescript(_SCHEMA)
        connection.execute(f"PRAGMA max_page_count={self.limit // self._page}")
        self.closed_as_cut = _close_open_rows(connection)
        self.last_seq: int = connection.execute("SELECT coalesce(max(seq), 0) FROM records").fetchone()[0]
        self.last_seq = max(self.last_seq, self.shipped())

    def shipped(self) -> int:
        """Up to which row the ledger has them."""
        return self.connection.execute("SELECT shipped FROM position").fetchone()[0]

    def used(self) -> int:
        """Bytes that are taken. What was taken away is used again, so the file itself does not become smaller."""
        pages: int = self.connection.execute("PRAGMA page_count").fetchone()[0]
        free: int = self.connection.execute("PRAGMA freelist_count").fetchone()[0]
        return (pages - free) * self._page

    @property
    def reserve(self) -> int:
        """Room that is left for the final rows of what is under way when new requests are refused."""
        return max(2 * 1024 * 1024, self.limit // 25)

    def insert(self, rows: list[Row]) -> None:
        """Writes rows, in one transaction. A row whose id is there already is left out."""
        connection = self.connection
        # One statement for many rows: sqlite3 gives up and takes back the GIL at each step, and takes it from a loop
        # that is busy. What fits into one statement needs no transaction around it either.
        if 0 < len(rows) <= MOST_ROWS:
            cursor = connection.execute(_insert(len(rows)), [value for row in rows for value in row])
            self.last_seq = max(self.last_seq, cursor.lastrowid or 0)
            return
        connection.execute("BEGIN IMMEDIATE")
        last = self.last_seq
        for at in range(0, len(rows), MOST_ROWS):
            part = rows[at : at + MOST_ROWS]
            cursor = connection.execute(_insert(len(part)), [value for row in part for value in row])
            last = max(last, cursor.lastrowid or 0)
        if not rows:
            # Nothing to write, but we must find out whether the disk takes rows again.
            connection.execute("INSERT OR REPLACE INTO probe VALUES (1, ?)", (time.time(),))
        connection.execute("COMMIT")
        self.last_seq = last

    def make_room(self) -> None:
        """Empties the write-ahead log, which may be what fills the disk. Raises sqlite3.Error."""
        self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        self.connection.close()
        os.close(self._lock)


class Tidy:
    """Notes what was shipped, and takes away what nobody needs any more, a slice at a time."""

    def __init__(self, connection: sqlite3.Connection, keep_seconds: float) -> None:
        self._connection = connection
        self._keep_seconds = keep_seconds
        self._stored: int = connection.execute("SELECT shipped FROM position").fetchone()[0]
        first = connection.execute("SELECT min(seq) FROM records").fetchone()[0]
        self._looked = self._stored if first is None else first - 1
        """Of the final rows up to here, the open and checkpoint rows are gone."""
        self._looked_at: deque[tuple[float, int]] = deque()

    def step(self, shipped: int, *, hurry: bool) -> bool:
        """One transaction; True when there is more to do. With `hurry` no final row is kept longer than it must be.

        An open row stays until its request's final row was shipped: a gateway that is killed closes it at its next
        start.

        Raises:
            sqlite3.Error: the disk refuses.
        """
        connection = self._connection
        to = min(shipped, self._looked + _SLICE)
        old = self._old(shipped, hurry=hurry)
        if shipped <= self._stored and to <= self._looked and not old:
            return False
        connection.execute("BEGIN IMMEDIATE")
        if shipped > self._stored:
            connection.execute("UPDATE position SET shipped = ?", (shipped,))
        if to > self._looked:
            connection.execute(
                "DELETE FROM records WHERE seq IN (SELECT r.seq FROM records f CROSS JOIN records r"
                " ON r.id > f.request || ':' AND r.id < f.request || ';'"
                " WHERE f.seq > ? AND f.seq <= ? AND f.kind = 'final' AND r.kind <> 'final' AND r.seq <= ?)",
                (self._looked, to, shipped),
            )
        taken = 0
        if old:
            taken = connection.execute(
                "DELETE FROM records WHERE seq IN"
                " (SELECT seq FROM records WHERE seq <= ? AND kind = 'final' ORDER BY seq LIMIT ?)",
                (old, _SLICE),
            ).rowcount
        connection.execute("COMMIT")
        self._stored = max(self._stored, shipped)
        if to > self._looked:
            self._looked, now = to, time.monotonic()
            if self._looked_at and now - self._looked_at[-1][0] < 1.0:
                self._looked_at[-1] = (self._looked_at[-1][0], to)
            else:
                self._looked_at.append((now, to))
        if old and taken < _SLICE:
            while self._looked_at and self._looked_at[0][1] <= old:
                self._looked_at.popleft()
        return taken == _SLICE or to < shipped

    def _old(self, shipped: int, *, hurry: bool) -> int:
        """Up to which row final rows need not be kept; 0: there is none."""
        if hurry:
            return min(self._looked, shipped) if self._looked_at else 0
        before = time.monotonic() - self._keep_seconds
        old = 0
        for at, seq in self._looked_at:
            if at > before:
                break
            old = seq
        return old


@functools.cache
def _insert(rows: int) -> str:
    return f"{_INSERT}{', (?, ?, ?, ?)' * (rows - 1)}"


def _close_open_rows(connection: sqlite3.Connection) -> int:
    """Gives each open row that has no final one a final row with outcome `cut`; returns how many."""
    rows = connection.execute(OPEN_ROWS).fetchall()
    connection.execute("BEGIN IMMEDIATE")
    for request, body in rows:
        connection.execute(_INSERT, (f"{request}:final", request, "final", _cut(request, body)))
    connection.execute("COMMIT")
    if rows:
        log.warning("closed the records of requests that a killed gateway held", requests=len(rows))
    return len(rows)


def _cut(request: str, body: bytes) -> bytes:
    """The final row of a request from its last one. As plain JSON: fields and words of a newer version, whose gateway
    wrote it before somebody went back to this one, are kept as they are."""
    record: dict[str, Any] = orjson.loads(body)
    record |= {"id": f"{request}:final", "time": datetime.now(UTC)}
    record["data"] |= {"kind": "final", "outcome": "cut"}
    return orjson.dumps(record)
