"""Reading a spool beside the gateway that writes it: by a person, and by the shipper."""

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import orjson

from shoal.api.usage import UsageRecord
from shoal.ledger.spoolfile import FILE_NAME
from shoal.ledger.spoolsalvage import record_of


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
        """Rows that were put aside: number, when, why, and what is left of the record."""
        try:
            rows = self._connection.execute("SELECT seq, at, reason, body FROM damaged ORDER BY seq").fetchall()
        except sqlite3.OperationalError:
            return []  # written by an older version
        return [(seq, datetime.fromtimestamp(at, UTC), reason, body) for seq, at, reason, body in rows]


_ROWS = "SELECT seq, kind, seq <= (SELECT shipped FROM position), body FROM records"


def _spooled(rows: Iterable[tuple[int, str, int, bytes]]) -> Iterator[SpooledRecord]:
    for seq, kind, shipped, body in rows:
        with contextlib.suppress(ValueError):  # a damaged one, until it is put aside
            yield SpooledRecord(seq, kind, bool(shipped), UsageRecord.model_validate(orjson.loads(body)))


# --- for the shipper ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows in a row, ready to be sent."""

    last: int
    """`seq` of the last one."""
    rows: int
    body: bytes
    """A JSON array of the records, byte for byte as they were written."""
    oldest: datetime
    """When the first was made, by the gateway's clock."""


class Batches:
    """Reads what is to be shipped. Use it in one thread at a time.

    SQLite puts the batch together: Python's module gives up and takes back the GIL for each row, and takes it from an
    event loop that is busy.
    """

    def __init__(self, file: Path) -> None:
        self._connection = sqlite3.connect(
            f"{file.resolve().as_uri()}?mode=ro", uri=True, timeout=10, check_same_thread=False
        )
        self._connection.text_factory = bytes

    def close(self) -> None:
        self._connection.close()

    def after(self, seq: int, *, rows: int, size: int) -> Batch | None:
        """What comes after row `seq`: so many rows, and so many bytes of records, at most, but one row at least. None:
        there is nothing.

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
        return Batch(last, count, b"[%b]" % body, _time(oldest))

    def broken(self, seq: int, last: int) -> list[tuple[int, str]]:
        """Rows after `seq` up to `last` whose record is not whole, and what is wrong with it. Raises sqlite3.Error."""
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
