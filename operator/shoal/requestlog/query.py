"""Finds the newest entries of a query in one store, reading no more files than necessary."""

import heapq
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import orjson

from shoal.requestlog.entry import user_hash
from shoal.requestlog.frames import Unreadable, read_frames
from shoal.requestlog.logkeys import LogKeys
from shoal.requestlog.store import LogFile, LogStore

FILE_SECONDS: Final = 3600.0
"""Longest time that a file is written (enforced by the settings)."""
_SLACK: Final = 60.0
MOST_BYTES: Final = 16 << 20
"""Most bytes of one page; further entries are on the next page."""
_TIME_AT: Final = len(b'{"time":"')
_TIME: Final = len(b"2026-11-22T01:31:19.123Z")
_ID_AT: Final = _TIME_AT + _TIME + len(b'","id":"')
_ID: Final = 36

Place = tuple[str, str]
"""Time and id of an entry: the order in which they are shown, the latest first."""


def written(moment: datetime) -> str:
    """A time in the format of entries: UTC, in milliseconds, with a fixed width, so that it sorts as text."""
    if moment.tzinfo is not UTC:
        moment = moment.astimezone(UTC)
    # orjson takes a tenth of the time of `isoformat`, but leaves out microseconds that are zero.
    text = orjson.dumps(moment).decode()
    return f"{text[1:24]}Z" if moment.microsecond else f"{text[1:20]}.000Z"


@dataclass(frozen=True, slots=True)
class LogQuery:
    tenant: str
    limit: int
    user: str | None = None
    model: str | None = None
    """`namespace/name` of a Model or an adapter, or the name that clients used."""
    route: str | None = None
    """`namespace/name` of a ModelRoute."""
    since: str | None = None
    """Only entries admitted at or after this time, in the format of `written`."""
    until: str | None = None
    """Only entries admitted before this time."""
    before: Place | None = None
    """Last entry of the previous page."""


@dataclass(slots=True)
class Found:
    lines: list[tuple[Place, bytes]] = field(default_factory=list[tuple[Place, bytes]])
    """The latest first."""
    more: bool = False
    unreadable: list[str] = field(default_factory=list[str])
    """Files that could not be read, with the reason."""
    incomplete: bool = False
    """The time limit was reached before all files were read."""


class Newest:
    """Keeps the latest entries of a page."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._heap: list[tuple[Place, bytes]] = []
        self._ids: set[str] = set()
        self._bytes = 0
        self._dropped: Place | None = None
        """The latest entry that did not fit. Older entries must not be added, or no page would show this one."""

    @property
    def more(self) -> bool:
        return self._dropped is not None

    @property
    def oldest(self) -> Place | None:
        """The oldest entry of a full page; None while the page is not full."""
        return self._heap[0][0] if self.more or len(self._heap) >= self._limit else None

    def add(self, place: Place, line: bytes) -> None:
        # An entry occurs twice while its file is both in the bucket and in the folder.
        if place[1] in self._ids or (self._dropped is not None and place < self._dropped):
            return
        self._ids.add(place[1])
        heapq.heappush(self._heap, (place, line))
        self._bytes += len(line)
        while len(self._heap) > self._limit or (self._bytes > MOST_BYTES and len(self._heap) > 1):
            gone, dropped = heapq.heappop(self._heap)
            self._bytes -= len(dropped)
            self._ids.discard(gone[1])
            self._dropped = gone if self._dropped is None else max(gone, self._dropped)

    def lines(self) -> list[tuple[Place, bytes]]:
        return sorted(self._heap, reverse=True)


def newest(store: LogStore, query: LogQuery, keys: LogKeys, *, longest: float, until: float) -> Found:
    """The latest entries of a store. Blocks; opens no further file after `until` (time.monotonic()). `longest` is the
    longest duration of a request in seconds. Raises OSError."""
    found, page, older = Found(), Newest(query.limit), False
    wanted = _filter(query)
    for file in _candidates(store, query, longest):
        last = _end(file)
        if (oldest := page.oldest) is not None and oldest[0] >= last:
            older = True  # there may be older entries: the next page shows them
            break
        if time.monotonic() > until:
            found.incomplete = True
            break
        try:
            with store.read(file) as opened:
                for frame in read_frames(opened, file.name, file.tenant, keys):
                    for line in frame.splitlines():
                        place = _place(line)
                        if place is not None and wanted(place, line):
                            page.add(place, line)
        except FileNotFoundError:
            continue  # it was deleted, or moved to the bucket
        except Unreadable as why:
            found.unreadable.append(f"{file.key}: {why}")
    found.lines, found.more = page.lines(), page.more or older
    return found


def _candidates(store: LogStore, query: LogQuery, longest: float) -> Iterator[LogFile]:
    """Files that may contain matching entries, newest first."""
    tops = [bound for bound in (query.until, query.before and query.before[0]) if bound]
    latest = _milliseconds(min(tops)) + (longest + _SLACK) * 1000 if tops else None
    for date in store.dates(query.tenant):
        for file in store.files(query.tenant, date):
            if query.since is not None and _end(file) < query.since:
                return
            if latest is None or file.began <= latest:
                yield file


def _end(file: LogFile) -> str:
    """Latest possible admission time of a file's entries."""
    return written(datetime.fromtimestamp(file.began / 1000, UTC) + timedelta(seconds=FILE_SECONDS + _SLACK))


def _milliseconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp() * 1000


def _place(line: bytes) -> Place | None:
    """Time and id of a line as `entry.py` writes it. Read by position, because most lines do not match."""
    if not line.startswith(b'{"time":"') or len(line) < _ID_AT + _ID:
        return None
    return (
        line[_TIME_AT : _TIME_AT + _TIME].decode("ascii", "replace"),
        line[_ID_AT : _ID_AT + _ID].decode("ascii", "replace"),
    )


def _filter(query: LogQuery) -> Callable[[Place, bytes], bool]:
    names = {} if query.model is None else {"model": query.model, "adapter": query.model, "modelRequested": query.model}
    by_user = None if query.user is None else is_user(query.tenant, query.user)
    by_route = None if query.route is None else orjson.dumps(query.route)

    def wanted(place: Place, line: bytes) -> bool:
        if query.since is not None and place[0] < query.since:
            return False
        if query.until is not None and place[0] >= query.until:
            return False
        if query.before is not None and place >= query.before:
            return False
        if by_user is not None and not by_user(line):
            return False
        if by_route is not None and (by_route not in line or orjson.loads(line).get("route") != query.route):
            return False
        if names:
            quoted = orjson.dumps(query.model)
            if quoted not in line:
                return False
            entry: dict[str, Any] = orjson.loads(line)
            return any(entry.get(name) == value for name, value in names.items())
        return True

    return wanted


def is_user(tenant: str, user: str) -> Callable[[bytes], bool]:
    """Returns a check whether a line belongs to a tenant's user, also if the user's name was redacted."""
    hashed = user_hash(tenant, user)
    signs = (orjson.dumps(user), hashed.encode())

    def check(line: bytes) -> bool:
        if not any(sign in line for sign in signs):
            return False
        entry: dict[str, Any] = orjson.loads(line)
        return entry.get("user") == user or entry.get("userHash") == hashed

    return check
