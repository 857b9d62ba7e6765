"""Recovers rows of a damaged spool page by page, without SQLite's B-trees.

SQLite reaches a row through the pages above it, so one damaged page hides many intact rows. Here each leaf page is read
directly, since it lists its own rows, and each row is checked separately: it is kept if its record is complete. If a
leaf page does not even list its rows, records are found by their first bytes. These records get new numbers, so that
they are shipped, perhaps a second time: the ledger recognises a record that it already has.
"""

import contextlib
import os
import sqlite3
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast, get_args

import orjson

from shoal.metering.record import RecordKind

_PAGE: Final = 4096
_LEAF: Final = 0x0D
_KINDS: Final = frozenset(get_args(RecordKind))
_WAL_HEADER: Final = 32
_FRAME_HEADER: Final = 24
_MOST_ROWS: Final = 1 << 48
"""A larger row number is damaged: no spool has that many rows."""
_BEGINNING: Final = b'{"specversion":'
_MOST_CARVED: Final = 64 * 1024
_MOST_BYTES: Final = 1 << 20
"""Most bytes of one record."""

Cell = tuple[int, list[object]]
"""Number of a row, and its columns."""


@dataclass(slots=True)
class Salvaged:
    """The recovered content."""

    rows: dict[int, tuple[str, str, str, bytes]] = field(default_factory=dict[int, tuple[str, str, str, bytes]])
    """By `seq`: id, request, kind, record."""
    damaged: int = 0
    """Rows whose record is incomplete."""
    shipped: int | None = None
    """Number of the last row that the ledger has; None: unreadable."""


def record_of(body: object, id: str | None = None) -> dict[str, Any] | None:
    """A row's record if it is complete: JSON with a kind and a request id, both repeated in the record's id; None:
    damaged."""
    if not isinstance(body, bytes):
        return None
    try:
        record: object = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(record, dict):
        return None
    found = cast(dict[str, Any], record)
    data: object = found.get("data")
    if not isinstance(data, dict) or not isinstance(found.get("id"), str) or not isinstance(found.get("time"), str):
        return None
    named = cast(dict[str, Any], data)
    kind, request = named.get("kind"), named.get("requestId")
    if kind not in _KINDS or not isinstance(request, str):
        return None
    # A flipped bit in one of them would end another request.
    name: str = found["id"]
    if name != (whole := f"{request}:{kind}") and not name.startswith(f"{whole}:"):
        return None
    return found if id is None or name == id else None


def salvage(path: Path) -> Salvaged:
    """Reads the file and its write-ahead log. Raises OSError."""
    found = Salvaged()
    raw = path.read_bytes()
    with contextlib.suppress(FileNotFoundError):
        log = path.with_name(f"{path.name}-wal").read_bytes()
        raw = b"".join((_in_place(raw, log), *_frames(log)))
    pages = len(raw) // _PAGE
    marks: list[int] = []
    for number in range(pages + 1):
        for seq, columns in _cells(raw, number):
            if len(columns) == 2 and columns[0] is None and isinstance(columns[1], int) and seq == 1:
                marks.append(columns[1])
            if len(columns) != 5 or columns[0] is not None or not 0 < seq < _MOST_ROWS:
                continue
            record = record_of(columns[4])
            if record is None:
                found.damaged += columns[3] in _KINDS
                continue
            data = record["data"]
            # The record's own fields are used: the columns may be damaged too.
            found.rows[seq] = (record["id"], data["requestId"], data["kind"], cast(bytes, columns[4]))
    last = max(found.rows, default=0)
    known = {row[0] for row in found.rows.values()}
    for body, record in _carved(raw):
        if record["id"] not in known:
            known.add(record["id"])
            data = record["data"]
            found.rows[max(found.rows, default=0) + 1] = (record["id"], data["requestId"], data["kind"], body)
    if marks and min(marks) >= 0:
        found.shipped = min(*marks, last)
    return found


def rewrite(path: Path, found: Salvaged, schema: str) -> None:
    """Creates a new file from the recovered content. Raises OSError, sqlite3.Error."""
    path.unlink(missing_ok=True)
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute("PRAGMA synchronous=FULL")
        connection.executescript(schema)
        connection.execute("BEGIN")
        connection.executemany(
            "INSERT OR IGNORE INTO records (seq, id, request, kind, body) VALUES (?, ?, ?, ?, ?)",
            ((seq, *row) for seq, row in sorted(found.rows.items())),
        )
        if found.shipped:
            connection.execute("UPDATE position SET shipped = ?", (found.shipped,))
            connection.execute("UPDATE position_again SET shipped = ?", (found.shipped,))
        connection.execute("COMMIT")
    finally:
        connection.close()


def _carved(raw: bytes) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Complete records at any position."""
    at = raw.find(_BEGINNING)
    while at >= 0:
        following = raw.find(_BEGINNING, at + 1)
        piece = raw[at : min(at + _MOST_CARVED, following if following > 0 else len(raw))]
        end = piece.rfind(b"}")
        # The bytes after a record seldom contain a brace: the first try is nearly always right.
        for _ in range(8):
            if end < 0:
                break
            if (record := record_of(piece[: end + 1])) is not None:
                yield piece[: end + 1], record
                break
            end = piece.rfind(b"}", 0, end)
        at = following


def _in_place(raw: bytes, log: bytes) -> bytes:
    """The file with its log's pages applied, as far as the log is intact: a row may continue in a page of the log."""
    pages = bytearray(raw)
    salts = log[16:24]
    for at in range(_WAL_HEADER, len(log) - _FRAME_HEADER - _PAGE + 1, _FRAME_HEADER + _PAGE):
        number = int.from_bytes(log[at : at + 4])
        if log[at + 8 : at + 16] != salts or not 0 < number <= len(raw) // _PAGE + len(log) // _PAGE:
            break
        if len(pages) < number * _PAGE:
            pages.extend(bytes(number * _PAGE - len(pages)))
        start = at + _FRAME_HEADER
        pages[(number - 1) * _PAGE : number * _PAGE] = log[start : start + _PAGE]
    return bytes(pages) + bytes(-len(pages) % _PAGE)


def _frames(log: bytes) -> Iterator[bytes]:
    """Every page of the log, regardless of its position."""
    for at in range(_WAL_HEADER, len(log) - _FRAME_HEADER - _PAGE + 1, _FRAME_HEADER + _PAGE):
        yield log[at + _FRAME_HEADER : at + _FRAME_HEADER + _PAGE]


def _cells(raw: bytes, number: int) -> Iterator[Cell]:
    """The rows of a table's leaf page; nothing for other pages or damaged cells."""
    start = number * _PAGE
    page = raw[start : start + _PAGE]
    header = 100 if number == 0 else 0
    if len(page) <= header + 8 or page[header] != _LEAF:
        return
    count = int.from_bytes(page[header + 3 : header + 5])
    for at in range(header + 8, min(header + 8 + 2 * count, len(page) - 1), 2):
        cell = int.from_bytes(page[at : at + 2])
        with contextlib.suppress(IndexError, ValueError, UnicodeDecodeError, struct.error):
            yield _cell(raw, page, cell)


def _cell(raw: bytes, page: bytes, at: int) -> Cell:
    size, at = _varint(page, at)
    seq, at = _varint(page, at)
    if not 0 < size <= _MOST_BYTES:
        raise ValueError("no record is as large")
    payload = page[at : at + size]
    if size > _PAGE - 35:
        least = (_PAGE - 12) * 32 // 255 - 23
        local = least + (size - least) % (_PAGE - 4)
        local = local if local <= _PAGE - 35 else least
        payload = page[at : at + local]
        following = int.from_bytes(page[at + local : at + local + 4])
        seen = 0
        while len(payload) < size and following and seen <= size // _PAGE + 1:
            start = (following - 1) * _PAGE
            following, seen = int.from_bytes(raw[start : start + 4]), seen + 1
            payload += raw[start + 4 : start + _PAGE]
        payload = payload[:size]
    if len(payload) < size:
        raise ValueError("the row is cut")
    return seq, list(_columns(payload))


def _columns(payload: bytes) -> Iterator[object]:
    header, at = _varint(payload, 0)
    body = header
    while at < header:
        kind, at = _varint(payload, at)
        if kind == 0:
            yield None
        elif kind <= 6:
            size = (0, 1, 2, 3, 4, 6, 8)[kind]
            yield int.from_bytes(payload[body : body + size], signed=True)
            body += size
        elif kind == 7:
            yield struct.unpack(">d", payload[body : body + 8])[0]
            body += 8
        elif kind in (8, 9):
            yield kind - 8
        else:
            size = (kind - 12) // 2
            if kind < 12 or body + size > len(payload):
                raise ValueError("no such value")
            raw = payload[body : body + size]
            yield raw if kind % 2 == 0 else raw.decode(errors="replace")
            body += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for index in range(8):
        byte = data[at + index]
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value, at + index + 1
    return value << 8 | data[at + 8], at + 9


def move(path: Path, to: Path) -> None:
    """Moves a spool's file and its log. Raises OSError."""
    to.parent.mkdir(exist_ok=True)
    for suffix in ("", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(to.with_name(to.name + suffix))
    _sync(path.parent)
    _sync(to.parent)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
