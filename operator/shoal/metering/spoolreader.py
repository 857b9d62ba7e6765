"""Reads a spool while a gateway writes it: for people, and for the shipper."""

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import orjson

from shoal.metering.record import UsageRecord
from shoal.metering.spoolfile import FILE_NAME
from shoal.metering.spoolsalvage import record_of


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
        """The newest `limit` rows, oldest first; with `request` only those of that request id (Shoal's or the
        client's), with `kinds` only those kinds."""
        where, values = ["1"], list[str | int]()
        if request is not None:
            where.append(
                "(request = ? OR CASE WHEN json_valid(CAST(body AS TEXT))"
                " THEN json_extract(CAST(body AS TEXT), '$.data.clientRequestId') END = ?)"
            )
            values += [request, request]
        if kinds is not None:
            where.append(f"kind IN ({', '.join('?' * len(kinds))})")
            values += kinds
        rows = self._connection.execute(
            f"{_ROWS} WHERE {' AND '.join(where)} ORDER BY seq DESC LIMIT ?",
            [*values, limit],
        ).fetchall()
        return list(_spooled(reversed(rows)))

    def after(self, seq: int) -> Iterator[SpooledRecord]:
        """Rows that came after `seq`."""
        return _spooled(self._connection.execute(f"{_ROWS} WHERE seq > ? ORDER BY seq", (seq,)).fetchall())

    def damaged(self) -> list[tuple[int, datetime, str, bytes]]:
        """Quarantined rows: number, time, reason, and what is left of the record."""
        try:
            rows = self._connection.execute("SELECT seq, at, reason, body FROM damaged ORDER BY seq").fetchall()
        except sqlite3.OperationalError:
            return []  # written by an older version
        return [(seq, datetime.fromtimestamp(at, UTC), reason, body) for seq, at, reason, body in rows]


_ROWS = "SELECT seq, kind, seq <= (SELECT shipped FROM position), body FROM records"


def _spooled(rows: Iterable[tuple[int, str, int, bytes]]) -> Iterator[SpooledRecord]:
    for seq, kind, shipped, body in rows:
        with contextlib.suppress(ValueError):  # a damaged row that is not quarantined yet
            yield SpooledRecord(seq, kind, bool(shipped), UsageRecord.model_validate(orjson.loads(body)))


# --- for the shipper ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SpoolBatch:
    """Consecutive rows, ready to be sent."""

    last: int
    """`seq` of the last row."""
    rows: int
    body: bytes
    """A JSON array of the records, byte for byte as they were written."""
    oldest: datetime
    """When the first row was created, by the gateway's clock."""


class Batches:
    """Reads the rows to be shipped. Use it in one thread at a time.

    SQLite builds the batch: Python's sqlite3 releases and takes the GIL for each row, which would slow down a busy
    event loop.
    """

    def __init__(self, file: Path) -> None:
        self._connection = sqlite3.connect(
            f"{file.resolve().as_uri()}?mode=ro", uri=True, timeout=10, check_same_thread=False
        )
        self._connection.text_factory = bytes

    def close(self) -> None:
        self._connection.close()

    def after(self, seq: int, *, rows: int, size: int) -> SpoolBatch | None:
        """The batch after row `seq`: at most `rows` rows and `size` bytes of records, but at least one row. None: there
        are no rows.

        Raises:
            sqlite3.Error: the file cannot be read.
        """
        connection = self._connection
        last, whole = connection.execute(_EXTENT, (seq, rows)).fetchone()
        if last is None:
            return None
        if whole > size:
            last = connection.execute(_LAST, (seq, rows, size)).fetchone()[0]
        count, body, oldest = connection.execute(_BATCH, (seq, last)).fetchone()
        return SpoolBatch(last, count, b"[%b]" % body, _time(oldest))

    def broken(self, seq: int, last: int) -> list[tuple[int, str]]:
        """Rows after `seq` up to `last` whose record is incomplete, with the reason. Raises sqlite3.Error."""
        rows = self._connection.execute("SELECT seq, body FROM records WHERE seq > ? AND seq <= ?", (seq, last))
        return [(number, "its record is not whole") for number, body in rows if record_of(body) is None]


def _time(text: bytes | None) -> datetime:
    with contextlib.suppress(ValueError, AttributeError):
        return datetime.fromisoformat((text or b"").decode())
    return datetime.now(UTC)


_EXTENT = "SELECT max(seq), sum(length(body)) FROM (SELECT seq, body FROM records WHERE seq > ?1 ORDER BY seq LIMIT ?2)"
_LAST = (
    "SELECT max(seq) FROM (SELECT seq, length(body) AS own, sum(length(body)) OVER (ORDER BY seq) AS whole"
    " FROM (SELECT seq, body FROM records WHERE seq > ?1 ORDER BY seq LIMIT ?2)) WHERE whole <= ?3 OR whole = own"
)
_BATCH = (
    "SELECT count(*), group_concat(CAST(body AS TEXT), ','),"
    " (SELECT CASE WHEN json_valid(CAST(body AS TEXT)) THEN json_extract(CAST(body AS TEXT), '$.time') END"
    " FROM records WHERE seq > ?1 ORDER BY seq LIMIT 1)"
    " FROM (SELECT body FROM records WHERE seq > ?1 AND seq <= ?2 ORDER BY seq)"
)
