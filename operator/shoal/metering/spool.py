"""The spool: keeps usage records on the gateway's own disk until the ledger has them.

SQLite in WAL mode with synchronous=FULL: an acknowledged row survives the death of the process and of the node. One
thread writes; rows that arrive during a commit go into the next one (group commit), so the number of syncs does not
grow with the load. At start, `open` rows without a `final` row belong to a killed gateway: they get a final row with
outcome `cut` and the counts of their last checkpoint.

The spool's size is bounded. When only the reserve is left, or the disk refuses writes, `error` is set; `when_full`
decides whether new requests are then refused. The spool recovers by itself when there is space again.
"""

import asyncio
import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import structlog

from shoal.metering.spoolfile import FILE_NAME, DamagedSpool, Row, SpoolFile, is_damage

log = structlog.get_logger()

_RETRY_SECONDS: Final = 1.0
_MAX_KEPT_ROWS: Final = 200_000
"""Most rows kept in memory while the disk refuses them. Further rows are dropped and counted, final ones last."""
_MEASURE_SECONDS: Final = 0.25
_HURRY: Final = 0.25
"""Share of the limit above which shipped rows are deleted at once."""
STUCK_SECONDS: Final = 10.0
"""A commit that takes longer counts as a failed disk."""
GROUP_SECONDS: Final = 0.002
"""How long the writer collects rows before a commit while many wait. Each commit costs CPU time on the event loop's
core: with 64 concurrent requests, collecting rows made the gateway a third faster and shortened each row's wait."""
GROUP_FROM_ROWS: Final = 4
"""The writer collects rows after a commit with at least this many waiting rows; otherwise it writes a row at once."""


class SpoolUnavailable(Exception):
    """No row can be stored: the disk is full, read-only or gone. The message has the reason."""


@dataclass(slots=True)
class SpoolStats:
    """Monotonic counters, read by the metrics."""

    rows: int = 0
    commits: int = 0
    failures: int = 0
    dropped: int = 0
    lost: int = 0
    """Dropped final rows: requests that were served and whose usage is lost."""
    closed_as_cut: int = 0
    damaged_rows: int = 0
    """Rows that were quarantined, or could not be read any more."""
    damaged_files: int = 0
    """Times that the file was damaged and rebuilt from what could be read."""


@dataclass(slots=True)
class _Batch:
    rows: list[Row] = field(default_factory=list[Row])
    waiting: list[tuple[Row, asyncio.Future[None]]] = field(default_factory=list[tuple[Row, asyncio.Future[None]]])
    flushes: list[asyncio.Future[None]] = field(default_factory=list[asyncio.Future[None]])
    quarantine: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])

    def __bool__(self) -> bool:
        return bool(self.rows or self.waiting or self.flushes or self.quarantine)


class UsageSpool:
    """The gateway's spool; create and use it in one event loop. `start` returns at once; the writer thread opens the
    file, and retries until it succeeds.

    With `when_full` Serve, `commit` never refuses a row once the file was opened: rows are kept in memory until the
    disk takes them. `keep_seconds`: how long final rows stay after they were shipped.
    """

    def __init__(
        self,
        directory: Path,
        *,
        max_bytes: int | None = None,
        when_full: Literal["Refuse", "Serve"] = "Refuse",
        keep_seconds: float = 900.0,
    ) -> None:
        self.path = directory / FILE_NAME
        self.stats = SpoolStats()
        self.used_bytes = 0
        self.limit_bytes: int | None = None
        """Set once the file was opened."""
        self._serves = when_full == "Serve"
        self._max_bytes = max_bytes
        self._keep_seconds = keep_seconds
        self._error: str | None = "the spool is being opened"
        self._full: str | None = None
        self._file: SpoolFile | None = None
        self._pending = _Batch()
        self._kept: list[Row] = []
        # The event loop takes the lock directly: `with` on a condition runs Python code and costs four times as much.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._sleeping = False
        self._stopping = False
        self._tidying = False
        self._measured_at = 0.0
        self._shipped = 0
        self._wake: Callable[[], object] | None = None
        self._thread: threading.Thread | None = None
        self._loop = asyncio.get_running_loop()
        self._opened: asyncio.Event = asyncio.Event()
        self._writing: tuple[float, _Batch] | None = None
        self._damage: str | None = None
        self._counted = (0, 0)
        """Damaged rows and files of the current file that are already counted in `stats`."""
        self.opened_times = 0
        """How often the file was opened. A concurrent reader opens the file again when this number has grown."""

    @property
    def error(self) -> str | None:
        """Why the spool stores no rows, or only rows of running requests; None while the spool works."""
        return self._error or self._full

    @property
    def refusing(self) -> str | None:
        """Why new requests must be refused; None if they need not be."""
        if self._serves and self._file is not None:
            return None
        return self._error or self._full

    @property
    def backlog(self) -> int:
        """Rows that are not on disk yet."""
        return len(self._pending.rows) + len(self._pending.waiting) + len(self._kept)

    @property
    def last_seq(self) -> int:
        """Number of the newest row on disk."""
        return 0 if self._file is None else self._file.last_seq

    @property
    def shipped(self) -> int:
        """Number of the last row marked as shipped."""
        return self._shipped

    def start(self) -> None:
        """Starts the writer thread."""
        self._thread = threading.Thread(target=self._run, name="spool", daemon=True)
        self._thread.start()

    async def opened(self) -> None:
        """Waits until the file was opened once, and the open rows of a killed gateway were closed."""
        await self._opened.wait()

    def commit(self, row: Row) -> asyncio.Future[None]:
        """A future that is done when the row is on disk, or kept in memory if `when_full` is Serve.

        Raises:
            SpoolUnavailable: at once or through the future; then the row is not stored.
        """
        future: asyncio.Future[None] = self._loop.create_future()
        if self._error is not None or self._full is not None:
            if (why := self.refusing) is not None:
                raise SpoolUnavailable(why)
            if self._error is not None:
                self.put(row)
                future.set_result(None)
                return future
        with self._lock:
            self._pending.waiting.append((row, future))
            if self._sleeping:
                self._changed.notify()
        return future

    def put(self, row: Row) -> None:
        """Adds the row to the next commit. Never blocks and never raises, as final rows in a `finally` need."""
        with self._lock:
            self._pending.rows.append(row)
            if self._sleeping:
                self._changed.notify()

    async def flush(self) -> None:
        """Returns when all earlier rows are on disk.

        Raises:
            SpoolUnavailable: the disk refuses.
        """
        future: asyncio.Future[None] = self._loop.create_future()
        with self._changed:
            self._pending.flushes.append(future)
            self._changed.notify()
        await future

    async def quarantine(self, rows: Sequence[tuple[int, str]]) -> None:
        """Moves damaged rows, given by number and reason, to the table `damaged`: they must not block the other rows.

        Raises:
            SpoolUnavailable: the disk refuses.
        """
        with self._changed:
            self._pending.quarantine.extend(rows)
        await self.flush()

    def damaged(self, why: str) -> None:
        """Reports that a concurrent reader found the file damaged: the writer thread rebuilds it."""
        with self._changed:
            self._damage = why
            self._tidying = True
            self._changed.notify()

    def wake_at_rows(self, wake: Callable[[], object]) -> None:
        """Calls `wake` once in the event loop, after the next rows are on disk."""
        self._wake = wake

    def mark(self, seq: int) -> None:
        """Notes that the ledger has all rows up to this one. The position is stored with the next `check`; if the
        process dies before that, the rows are shipped again."""
        self._shipped = max(self._shipped, seq)

    def check(self) -> None:
        """Refuses rows that have waited too long for the disk, and starts the deletion of shipped rows; call it about
        once a second."""
        with self._changed:
            self._tidying = True
            if self._sleeping:
                self._changed.notify()
        writing = self._writing
        if writing is None or time.monotonic() - writing[0] < STUCK_SECONDS:
            return
        self._error = f"the disk has not answered for {STUCK_SECONDS:g} s"
        with self._changed:
            waiting, self._pending.waiting = self._pending.waiting, []
            if self._serves:
                self._pending.rows.extend(row for row, _ in waiting)
                self._trim(self._pending.rows)
        futures = [future for _, future in (*waiting, *writing[1].waiting)]
        if self._serves:
            _resolve(futures)
        else:
            _reject(futures, SpoolUnavailable(self._error))

    async def stop(self) -> None:
        """Writes the remaining rows and closes the file."""
        with self._changed:
            self._stopping = self._tidying = True
            self._changed.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    # --- the writer thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        file: SpoolFile | None = None
        grouping = False
        try:
            while True:
                if file is not None and self._damage is not None:
                    file.close()
                    file = None
                if file is None:
                    try:
                        file = self._open()
                    except (OSError, sqlite3.Error, DamagedSpool, UnicodeError) as error:
                        self._fail(error)
                        stopping = self._wait_retry()
                        batch = self._take()
                        self._keep(batch)
                        self._refuse(batch)
                        if stopping:
                            if lost := self.backlog:
                                log.error("usage records are lost: the spool was not opened", rows=lost)
                            return
                        continue
                    self._notify(self._opened.set)
                if grouping:
                    time.sleep(GROUP_SECONDS)
                batch = self._take()
                grouping = len(batch.waiting) >= GROUP_FROM_ROWS
                idle = not batch and not self._kept and self._error is None
                if idle and not self._tidying:
                    if self._stopping:
                        return
                    self._wait_work()
                    continue
                if self._error is not None:
                    with contextlib.suppress(sqlite3.Error):
                        file.make_room()
                    self._tidy(file)
                try:
                    if not idle:
                        self._writing = (time.monotonic(), batch)
                        self._write(file, batch)
                except (OSError, sqlite3.Error, UnicodeError) as error:
                    self._writing = None
                    self._roll_back(file)
                    self._fail(error)
                    self._keep(batch)
                    self._refuse(batch)
                    if is_damage(error):
                        self._damage = str(error)
                    elif self._wait_retry():
                        log.error("usage records are lost: the spool did not take them", rows=self.backlog)
                        return
                else:
                    self._writing = None
                    self._acknowledge(batch)
                    if self._tidying:
                        self._tidy(file)
                    elif time.monotonic() - self._measured_at >= _MEASURE_SECONDS:
                        self._measure(file)
        finally:
            if file is not None:
                file.close()

    def _open(self) -> SpoolFile:
        # When the file is opened again, open rows belong to running requests, not to a killed gateway.
        file = SpoolFile(self.path, self._max_bytes, self._keep_seconds, self._damage, close_open=not self.opened_times)
        self._damage = None
        self._counted = (0, 0)
        self.opened_times += 1
        self._count_damage(file)
        self.stats.closed_as_cut += file.closed_as_cut
        self.limit_bytes = file.limit
        self._shipped = file.shipped()
        self._measure(file)
        self._file = file
        self._error = None
        return file

    def _write(self, file: SpoolFile, batch: _Batch) -> None:
        rows = [*self._kept, *batch.rows, *(row for row, _ in batch.waiting)]
        if rows or not batch.quarantine:
            file.insert(rows)
        if batch.quarantine:
            file.quarantine(batch.quarantine)
            self._count_damage(file)
        self.stats.rows += len(rows)
        self.stats.commits += 1
        if self._error is not None:
            log.info("the spool takes records again", path=str(self.path))
            self._error = None
        self._kept = []
        if rows and (wake := self._wake) is not None:
            self._wake = None
            self._notify(wake)

    def _count_damage(self, file: SpoolFile) -> None:
        now, (rows, files) = (file.damaged_rows, file.damaged_files), self._counted
        self.stats.damaged_rows += now[0] - rows
        self.stats.damaged_files += now[1] - files
        self._counted = now

    def _tidy(self, file: SpoolFile) -> None:
        """Deletes one slice of shipped rows."""
        hurry = self.used_bytes > file.limit * _HURRY or self._error is not None
        try:
            more = file.tidy.step(self._shipped, hurry=hurry)
            self._measure(file)
        except sqlite3.Error as error:
            self._roll_back(file)
            self.stats.failures += 1
            log.debug("the spool was not tidied", error=str(error))
            if is_damage(error):
                self._damage = str(error)
            more = False  # the next commit handles the error
        self._tidying = more and not self._stopping

    def _measure(self, file: SpoolFile) -> None:
        self._measured_at = time.monotonic()
        self.used_bytes = used = file.used()
        most = file.limit - file.reserve
        if self._full is None and used > most:
            self._full = f"the spool is full: {used >> 20} MiB of {file.limit >> 20} wait for the ledger"
            log.error("the spool cannot keep more requests", path=str(self.path), error=self._full)
        elif self._full is not None and used <= most - file.reserve:
            self._full = None
            log.info("the spool has space again", path=str(self.path), used_mib=used >> 20)

    def _roll_back(self, file: SpoolFile) -> None:
        with contextlib.suppress(sqlite3.Error):
            file.connection.rollback()

    def _take(self) -> _Batch:
        with self._changed:
            batch, self._pending = self._pending, _Batch()
            return batch

    def _keep(self, batch: _Batch) -> None:
        self._kept.extend(batch.rows)
        if self._serves and self._file is not None:
            self._kept.extend(row for row, _ in batch.waiting)
        self._trim(self._kept)

    def _trim(self, rows: list[Row]) -> None:
        extra = len(rows) - _MAX_KEPT_ROWS
        if extra <= 0:
            return
        # Open and checkpoint rows are dropped first: the request's final row contains everything that they contain.
        spare = [at for at, row in enumerate(rows) if row[2] in ("open", "checkpoint")][:extra]
        gone = set(spare)
        rows[:] = [row for at, row in enumerate(rows) if at not in gone]
        if (extra := len(rows) - _MAX_KEPT_ROWS) > 0:
            del rows[:extra]
            self.stats.lost += extra
            self.stats.dropped += extra
        self.stats.dropped += len(spare)

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
        error = SpoolUnavailable(self._error or "the spool is closed")
        if batch.waiting:
            futures = [future for _, future in batch.waiting]
            if self._serves and self._file is not None:
                self._notify(_resolve, futures)
            else:
                self._notify(_reject, futures, error)
        if batch.flushes:
            self._notify(_reject, batch.flushes, error)

    def _notify(self, function: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits any more
            self._loop.call_soon_threadsafe(function, *args)

    def _wait_work(self) -> None:
        with self._changed:
            if not self._pending and not self._stopping and not self._tidying:
                self._sleeping = True
                self._changed.wait()
                self._sleeping = False

    def _wait_retry(self) -> bool:
        """Waits before the next try; True when the process stops and must not wait for the disk."""
        with self._changed:
            if not self._stopping:
                self._changed.wait_for(lambda: self._stopping, _RETRY_SECONDS)
            return self._stopping


def _resolve(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


def _reject(futures: list[asyncio.Future[None]], error: Exception) -> None:
    for future in futures:
        if not future.done():
            future.set_exception(error)
