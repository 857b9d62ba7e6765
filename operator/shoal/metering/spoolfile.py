"""The spool's file: its tables, opening and repair, its size limit, and the deletion of shipped rows.

Rows are shipped in the order of `seq`, so one number, `position.shipped`, marks which rows are shipped.
"""

import fcntl
import functools
import os
import sqlite3
import time
from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, cast

import orjson
import structlog

from shoal.metering import spoolsalvage
from shoal.metering.record import RecordKind

log = structlog.get_logger()

FILE_NAME: Final = "spool.sqlite"
MOST_ROWS: Final = 64
"""Rows per statement."""
MOST_BYTES: Final = 1536 * 1024 * 1024
"""Default size limit of the spool."""
_SHARE_OF_VOLUME: Final = 0.8
"""Largest share of the volume that the spool uses. The rest is for the write-ahead log and for other files."""
_SLICE: Final = 512
"""Rows deleted at a time, which blocks new rows for a few milliseconds."""

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
CREATE TABLE IF NOT EXISTS position_again (one INTEGER PRIMARY KEY CHECK (one = 1), shipped INTEGER NOT NULL);
INSERT OR IGNORE INTO position_again SELECT 1, shipped FROM position;
CREATE TABLE IF NOT EXISTS damaged (
  seq INTEGER PRIMARY KEY,
  at REAL NOT NULL,
  reason TEXT NOT NULL,
  body BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS open_rows ON records (request) WHERE kind = 'open';
"""
# position_again: with a damaged position that is too high, rows would never be shipped. So the position is stored
# twice, and the lower value counts.
# open_rows: a start reads only open rows. Without this index, a start would read the whole spool, which may hold a
# quarter of an hour of rows, or all rows since the ledger failed, before the first request could be accepted.
OPEN_ROWS: Final = (
    "SELECT o.request, r.seq, r.body FROM records o INDEXED BY open_rows"
    " JOIN records r ON r.seq = coalesce((SELECT c.seq FROM records c WHERE c.id > o.request || ':checkpoint:'"
    " AND c.id < o.request || ':checkpoint;' ORDER BY c.seq DESC LIMIT 1), o.seq)"
    " WHERE o.kind = 'open' AND NOT EXISTS (SELECT 1 FROM records f WHERE f.id = o.request || ':final')"
)
"""Requests without a final row, each with its last checkpoint or else its open row."""
_CHECKED_BYTES: Final = 256 * 1024 * 1024
"""A file up to this size is checked completely when it is opened: half a second. Damage in a larger file is found when
it is read."""
_CORRUPT: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT})
_KEPT_FILES: Final = 2
"""Damaged files that are kept; older ones are deleted."""
_KEPT_ROWS: Final = 10_000
"""Approximate number of damaged rows that are kept."""
DAMAGED_FOLDER: Final = "damaged"
_SALVAGED: Final = "salvaged.sqlite"
_TABLES: Final = frozenset({"records", "probe", "position", "position_again", "damaged", "sqlite_sequence"})
_INSERT: Final = "INSERT OR IGNORE INTO records (id, request, kind, body) VALUES (?, ?, ?, ?)"

Row = tuple[str, str, RecordKind, bytes]
"""(id, request id, kind, record as JSON)."""


class DamagedSpool(Exception):
    """The file's content is inconsistent."""


def is_damage(error: Exception, *, opening: bool = False) -> bool:
    """Whether an error means that the file is damaged, rather than that the disk refuses. While the file is opened,
    unexpected tables count as damage too."""
    if isinstance(error, DamagedSpool | UnicodeError):
        return True  # SQLite's message quotes bytes that it could not read
    code = getattr(error, "sqlite_errorcode", None)
    if not isinstance(error, sqlite3.DatabaseError) or code is None:
        return False
    return code & 0xFF in _CORRUPT or (opening and code & 0xFF in (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CONSTRAINT))


class SpoolFile:
    """The spool's file, locked by one writer. A damaged file is moved to the folder `damaged`, and its readable rows
    are copied to a new file; `damage` is the reason if damage was found earlier. With `close_open`, open rows without a
    final row are closed, because they belong to a killed gateway.

    Raises:
        OSError: the file cannot be opened, or another gateway uses it.
        sqlite3.Error: the file is no spool, or the disk refuses.
    """

    def __init__(
        self,
        path: Path,
        max_bytes: int | None,
        keep_seconds: float,
        damage: str | None = None,
        *,
        close_open: bool = True,
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._closes_open = close_open
        self._lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            # Two writers would close each other's open rows as cut.
            raise OSError(f"another gateway uses the spool {path}") from None
        self.closed_as_cut = 0
        self.damaged_rows = 0
        """Rows that were quarantined or could not be read since the file was opened."""
        self.damaged_files = 0
        try:
            _finish_salvage(path)
            if damage is not None:
                self._salvage(path, damage)
            try:
                self._connect(path, max_bytes)
            except (sqlite3.Error, DamagedSpool, UnicodeError) as error:
                if not is_damage(error, opening=True):
                    raise
                self._salvage(path, str(error))
                self._connect(path, max_bytes)
            self.tidy = Tidy(self.connection, keep_seconds)
        except BaseException:
            os.close(self._lock)
            raise

    def _connect(self, path: Path, max_bytes: int | None) -> None:
        self.connection = sqlite3.connect(path, isolation_level=None, timeout=10, cached_statements=MOST_ROWS + 32)
        self.connection.text_factory = _text
        try:
            self._prepare(path, max_bytes)
        except BaseException:
            self.connection.close()
            raise

    def _salvage(self, path: Path, why: str) -> None:
        found = spoolsalvage.salvage(path)
        new = path.with_name(_SALVAGED)
        spoolsalvage.rewrite(new, found, _SCHEMA)
        old = path.parent / DAMAGED_FOLDER / f"spool-{time.time_ns()}.sqlite"
        spoolsalvage.move(path, old)
        _finish_salvage(path)
        for file in sorted(old.parent.glob("spool-*.sqlite"))[:-_KEPT_FILES]:
            for each in (file, file.with_name(f"{file.name}-wal"), file.with_name(f"{file.name}-shm")):
                each.unlink(missing_ok=True)
        self.damaged_rows += found.damaged
        self.damaged_files += 1
        log.error(
            "the spool was damaged: its readable rows are in a new file",
            error=why,
            rows=len(found.rows),
            damaged_rows=found.damaged,
            kept_as=str(old),
        )

    def _prepare(self, path: Path, max_bytes: int | None) -> None:
        volume = os.statvfs(path.parent)
        self.limit = min(max_bytes or MOST_BYTES, int(volume.f_blocks * volume.f_frsize * _SHARE_OF_VOLUME))
        """Most bytes of the file; beyond this size SQLite reports that the database is full."""
        connection = self.connection
        _check(connection, path)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        self._page: int = connection.execute("PRAGMA page_size").fetchone()[0]
        connection.execute(f"PRAGMA wal_autocheckpoint={max(100, min(8000, self.limit // 8 // self._page))}")
        # The index is created before the size limit is set: an older version may have left a full spool.
        connection.executescript(_SCHEMA)
        connection.execute(f"PRAGMA max_page_count={self.limit // self._page}")
        self.closed_as_cut = self._close_open_rows() if self._closes_open else 0
        self.last_seq: int = connection.execute("SELECT coalesce(max(seq), 0) FROM records").fetchone()[0]
        self.last_seq = max(self.last_seq, self.shipped())

    def shipped(self) -> int:
        """Number of the last row that was shipped."""
        return shipped_of(self.connection)

    def used(self) -> int:
        """Bytes in use. The space of deleted rows is reused, so the file itself does not shrink."""
        pages: int = self.connection.execute("PRAGMA page_count").fetchone()[0]
        free: int = self.connection.execute("PRAGMA freelist_count").fetchone()[0]
        return (pages - free) * self._page

    @property
    def reserve(self) -> int:
        """Space kept for the final rows of running requests when new requests are refused."""
        return max(2 * 1024 * 1024, self.limit // 25)

    def insert(self, rows: list[Row]) -> None:
        """Writes rows in one transaction. A row whose id already exists is left out."""
        connection = self.connection
        # One statement for many rows: sqlite3 releases and takes the GIL at each step, which would slow down a busy
        # event loop. A single statement needs no explicit transaction either.
        if 0 < len(rows) <= MOST_ROWS:
            cursor = connection.execute(_insert(len(rows)), _values(rows))
            self.last_seq = max(self.last_seq, cursor.lastrowid or 0)
            return
        connection.execute("BEGIN IMMEDIATE")
        last = self.last_seq
        for at in range(0, len(rows), MOST_ROWS):
            part = rows[at : at + MOST_ROWS]
            cursor = connection.execute(_insert(len(part)), _values(part))
            last = max(last, cursor.lastrowid or 0)
        if not rows:
            # Nothing to write: only test whether the disk takes rows again.
            connection.execute("INSERT OR REPLACE INTO probe VALUES (1, ?)", (time.time(),))
        connection.execute("COMMIT")
        self.last_seq = last

    def quarantine(self, rows: Sequence[tuple[int, str]]) -> None:
        """Moves damaged rows, given by `seq` and reason, to the table `damaged`: they must not block the other rows."""
        connection = self.connection
        connection.execute("BEGIN IMMEDIATE")
        for seq, reason in rows:
            connection.execute(
                "INSERT OR REPLACE INTO damaged SELECT seq, ?, ?, body FROM records WHERE seq = ?",
                (time.time(), reason, seq),
            )
            self.damaged_rows += connection.execute("DELETE FROM records WHERE seq = ?", (seq,)).rowcount
        connection.execute("DELETE FROM damaged WHERE seq <= (SELECT max(seq) FROM damaged) - ?", (_KEPT_ROWS,))
        connection.execute("COMMIT")
        log.error(
            "rows of the spool are damaged and were quarantined", rows=len(rows), reason=rows[0][1] if rows else ""
        )

    def _close_open_rows(self) -> int:
        """Adds a final row with outcome `cut` for each open row that has none; returns their number."""
        connection = self.connection
        while True:
            rows = connection.execute(OPEN_ROWS).fetchall()
            records = [(request, seq, spoolsalvage.record_of(body)) for request, seq, body in rows]
            broken = [(seq, "its record is not whole") for _, seq, record in records if record is None]
            if not broken:
                break
            self.quarantine(broken)  # then an earlier row of the request is used
        connection.execute("BEGIN IMMEDIATE")
        for _, _, record in records:
            if record is not None:
                request = record["data"]["requestId"]
                connection.execute(_INSERT, (f"{request}:final", request, "final", _cut(request, record)))
        connection.execute("COMMIT")
        if rows:
            log.warning("closed the records of a killed gateway's requests", requests=len(rows))
        return len(rows)

    def make_room(self) -> None:
        """Empties the write-ahead log, which may be what fills the disk. Raises sqlite3.Error."""
        self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        self.connection.close()
        os.close(self._lock)


class Tidy:
    """Stores the shipped position, and deletes rows that are no longer needed, a slice at a time."""

    def __init__(self, connection: sqlite3.Connection, keep_seconds: float) -> None:
        self._connection = connection
        self._keep_seconds = keep_seconds
        self._stored = shipped_of(connection)
        first = connection.execute("SELECT min(seq) FROM records").fetchone()[0]
        self._tidied = self._stored if first is None else first - 1
        """The open and checkpoint rows of all final rows up to this one are deleted."""
        self._tidied_at: deque[tuple[float, int]] = deque()

    def step(self, shipped: int, *, hurry: bool) -> bool:
        """Runs one transaction; True when there is more to do. With `hurry` shipped final rows are deleted at once.

        An open row stays until its request's final row was shipped, so that the next start after a kill can close it.
        An attempt's row does not wait for one: the copy of a request for a mirror has no other row.

        Raises:
            sqlite3.Error: the disk refuses.
        """
        connection = self._connection
        to = min(shipped, self._tidied + _SLICE)
        old = self._old(shipped, hurry=hurry)
        if shipped <= self._stored and to <= self._tidied and not old:
            return False
        connection.execute("BEGIN IMMEDIATE")
        if shipped > self._stored:
            connection.execute("UPDATE position SET shipped = ?", (shipped,))
            connection.execute("UPDATE position_again SET shipped = ?", (shipped,))
        if to > self._tidied:
            connection.execute(
                "DELETE FROM records WHERE seq IN (SELECT r.seq FROM records f CROSS JOIN records r"
                " ON r.id > f.request || ':' AND r.id < f.request || ';'"
                " WHERE f.seq > ? AND f.seq <= ? AND f.kind = 'final' AND r.kind <> 'final' AND r.seq <= ?)",
                (self._tidied, to, shipped),
            )
        taken = 0
        if old:
            taken = connection.execute(
                "DELETE FROM records WHERE seq IN"
                " (SELECT seq FROM records WHERE seq <= ? AND kind IN ('final', 'attempt') ORDER BY seq LIMIT ?)",
                (old, _SLICE),
            ).rowcount
        connection.execute("COMMIT")
        self._stored = max(self._stored, shipped)
        if to > self._tidied:
            self._tidied, now = to, time.monotonic()
            if self._tidied_at and now - self._tidied_at[-1][0] < 1.0:
                self._tidied_at[-1] = (self._tidied_at[-1][0], to)
            else:
                self._tidied_at.append((now, to))
        if old and taken < _SLICE:
            while self._tidied_at and self._tidied_at[0][1] <= old:
                self._tidied_at.popleft()
        return taken == _SLICE or to < shipped

    def _old(self, shipped: int, *, hurry: bool) -> int:
        """The last row up to which rows of ends and of attempts may be deleted; 0: none."""
        if hurry:
            return min(self._tidied, shipped) if self._tidied_at else 0
        before = time.monotonic() - self._keep_seconds
        old = 0
        for at, seq in self._tidied_at:
            if at > before:
                break
            old = seq
        return old


@functools.cache
def _insert(rows: int) -> str:
    return f"{_INSERT}{', (?, ?, ?, ?)' * (rows - 1)}"


def _values(rows: list[Row]) -> list[str | bytearray]:
    """In the order of `_insert`. A body of `bytes` would cost sqlite3 a search for an adapter, and an error."""
    return [value for id, request, kind, body in rows for value in (id, request, kind, bytearray(body))]


def _text(text: bytes) -> str:
    return text.decode(errors="replace")


def shipped_of(connection: sqlite3.Connection) -> int:
    """Number of the last row that was shipped. Raises DamagedSpool."""
    sql = "SELECT shipped FROM position UNION ALL SELECT shipped FROM position_again"
    found: list[object] = [row[0] for row in connection.execute(sql)]
    if len(found) != 2 or not all(type(each) is int and each >= 0 for each in found):
        raise DamagedSpool("its shipped position cannot be read")
    return min(cast(list[int], found))


def _check(connection: sqlite3.Connection, path: Path) -> None:
    """Raises DamagedSpool, sqlite3.Error."""
    names = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if names and (names - _TABLES or "records" not in names):
        raise DamagedSpool("its tables are not a spool's")
    if names:
        connection.execute("SELECT seq, id, request, kind, body FROM records LIMIT 0").fetchone()
    if path.stat().st_size <= _CHECKED_BYTES:
        (found,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
        if found != "ok":
            raise DamagedSpool(found)


def _finish_salvage(path: Path) -> None:
    """Puts the salvaged file in place. Also completes a salvage that was interrupted by the process's death."""
    new = path.with_name(_SALVAGED)
    if not path.exists() and new.exists():
        new.rename(path)


def _cut(request: str, record: dict[str, Any]) -> bytes:
    """The final row of a request, from its last row. Edited as plain JSON, so that fields and values written by a newer
    version, before a downgrade, are kept."""
    record |= {"id": f"{request}:final", "time": datetime.now(UTC)}
    record["data"] |= {"kind": "final", "outcome": "cut"}
    return orjson.dumps(record)
