"""The ledger's writer: the only thread that writes to the database.

Batches that arrive during a commit are committed together (group commit), so the number of syncs does not grow with the
number of gateways. Nothing waits in memory while the database is unavailable: callers get an error at once, and
gateways keep their records in their spools.
"""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import structlog
from sqlalchemy import Connection
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, InterfaceError, InternalError, OperationalError

from shoal.api.ledger import BatchAnswer
from shoal.ledger import ingest
from shoal.ledger.database import Database, DatabaseUnavailable, reason
from shoal.ledger.parse import Incoming
from shoal.ledger.sums import Changes, Cost, free

log = structlog.get_logger()

MOST_RECORDS: Final = 10_000
"""Records per transaction at most, unless a single batch is larger."""
RETRY_SECONDS: Final = 1.0
"""Interval between attempts to reach an unavailable database."""


@dataclass(slots=True)
class WriterStats:
    """Monotonic counters, read by the metrics."""

    new: int = 0
    known: int = 0
    quarantined: int = 0
    commits: int = 0
    commit_seconds: float = 0.0
    failures: int = 0


@dataclass(slots=True)
class Take:
    """A batch of records."""

    records: Sequence[Incoming]
    future: asyncio.Future[BatchAnswer]


@dataclass(slots=True)
class Write:
    """Any other write."""

    work: Callable[[Connection], Any]
    then: Callable[[Any], None] | None
    future: asyncio.Future[Any]


@dataclass(slots=True)
class _Jobs:
    """Queue of the writer."""

    queue: deque[Take | Write] = field(default_factory=deque[Take | Write])
    records: int = 0


class LedgerWriter:
    """Owns the writer thread; create it in the event loop that gets the results. The thread opens the database,
    retrying until it succeeds, and executes submitted jobs.

    `restore` is called in the thread after each (re)connection, before anything is taken or answered; if it fails, the
    database counts as unavailable. `opened` is called in the event loop after each (re)connection, `committed` after
    each commit that changed sums, in commit order.
    """

    def __init__(self, database: Database, *, keep_days: int | None = None) -> None:
        self.database: Final = database
        self.stats = WriterStats()
        self.restore: Callable[[Connection], None] = lambda _: None
        self.opened: Callable[[], None] = lambda: None
        self.committed: Callable[[Changes], None] = lambda _: None
        self.cost: Cost = free
        """Called in the writer's thread to compute the cost in gateways' counters."""
        self._error: str | None = "the database is being opened"
        self._jobs = _Jobs()
        self._keep_ms = None if keep_days is None else keep_days * 86_400_000
        self._changed = threading.Condition()
        self._stopping = False
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="ledger-writer", daemon=True)

    @property
    def error(self) -> str | None:
        """Why records cannot be stored; None: they can."""
        return self._error

    @property
    def waiting(self) -> int:
        """Records waiting for their commit."""
        return self._jobs.records

    def start(self) -> None:
        """Starts the thread; returns at once."""
        self._thread.start()

    def submit(self, job: Take | Write) -> None:
        """Queues a job. Its future gets the result, or DatabaseUnavailable.

        Raises:
            DatabaseUnavailable: nothing can be written now.
        """
        if self._error is not None:
            raise DatabaseUnavailable(self._error)
        with self._changed:
            if self._stopping:
                raise DatabaseUnavailable("the ledger stops")
            self._jobs.queue.append(job)
            self._jobs.records += len(job.records) if isinstance(job, Take) else 0
            self._changed.notify()

    async def finish(self) -> None:
        """Executes waiting jobs and ends the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with contextlib.ExitStack() as stack:
                try:
                    connection = self.database.open(stack)
                    with connection.begin():
                        self.restore(connection)
                except Exception as error:
                    self._failed(error)
                    if self._pause():
                        return
                    continue
                self._recovered()
                self._notify(self.opened)
                if self._serve(connection):
                    return
            if self._pause():
                return

    def _serve(self, connection: Connection) -> bool:
        """Executes jobs until the store stops (True) or the database fails (False)."""
        while True:
            jobs = self._next()
            if not jobs:
                return True
            began = time.monotonic()
            try:
                if isinstance(jobs[0], Write):
                    self._write(connection, jobs[0])
                else:
                    self._take(connection, [job for job in jobs if isinstance(job, Take)])
            except Exception as error:
                if _may_be_a_record(error):
                    log.exception("the ledger's writer failed")
                self._failed(error)
                self._refuse(jobs)
                return False
            self.stats.commits += 1
            self.stats.commit_seconds += time.monotonic() - began

    def _next(self) -> list[Take | Write]:
        """Waits for jobs. Returns several `Take`s together, or one `Write`; nothing when the store has stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs.queue or self._stopping)
            jobs: list[Take | Write] = []
            records = 0
            queue = self._jobs.queue
            while queue:
                job = queue[0]
                if isinstance(job, Write):
                    if not jobs:
                        jobs.append(queue.popleft())
                    break
                if jobs and records + len(job.records) > MOST_RECORDS:
                    break
                records += len(job.records)
                jobs.append(queue.popleft())
            self._jobs.records -= records
            return jobs

    def _write(self, connection: Connection, job: Write) -> None:
        try:
            with connection.begin():
                result = job.work(connection)
        except Exception as error:
            if _is_away(error):
                raise
            self._notify(_reject, [job.future], error)
            return
        if job.then is not None:
            self._notify(job.then, result)
        self._notify(_resolve, job.future, result)

    def _take(self, connection: Connection, jobs: list[Take]) -> None:
        batches: Sequence[Sequence[Incoming]] = [job.records for job in jobs]
        now = _now_ms()
        try:
            with connection.begin():
                taken, changes = ingest.write(connection, batches, now, self._keep_ms, self.cost)
        except Exception as error:
            if not _may_be_a_record(error):
                raise
            # An unforeseen bad record must not block all others for ever.
            log.error("the database rejected records: they are quarantined", error=reason(error))
            batches = ingest.one_by_one(connection, batches, now, lambda error: not _may_be_a_record(error))
            with connection.begin():
                taken, changes = ingest.write(connection, batches, now, self._keep_ms, self.cost)
        for each in taken:
            self.stats.new += each.new
            self.stats.known += each.known
            self.stats.quarantined += each.aside
        if changes:
            self._notify(self.committed, changes)
        for job, each in zip(jobs, taken, strict=True):
            self._notify(_resolve, job.future, each)

    def _recovered(self) -> None:
        if self._error is not None:
            log.info("the ledger takes records", database=self.database.name)
        self._error = None

    def _failed(self, error: BaseException) -> None:
        self.stats.failures += 1
        text = str(error) if isinstance(error, DatabaseUnavailable) else reason(error)
        if self._error != text:
            log.error("the ledger cannot keep records", database=self.database.name, error=text)
        self._error = text

    def _pause(self) -> bool:
        """Fails waiting jobs, then waits before the next attempt; True when the store stops."""
        with self._changed:
            jobs = [*self._jobs.queue]
            self._jobs = _Jobs()
            self._refuse(jobs)
            self._changed.wait_for(lambda: self._stopping, RETRY_SECONDS)
            return self._stopping

    def _refuse(self, jobs: Sequence[Take | Write]) -> None:
        if jobs:
            self._notify(_reject, [job.future for job in jobs], DatabaseUnavailable(self._error or "the ledger stops"))

    def _notify(self, function: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: there are no callers any more
            self._loop.call_soon_threadsafe(function, *args)


def _is_away(error: BaseException) -> bool:
    """Whether the connection or the disk failed, rather than the statement."""
    if isinstance(error, DBAPIError):
        return error.connection_invalidated or isinstance(error, (OperationalError, InterfaceError, InternalError))
    return isinstance(error, OSError)


def _may_be_a_record(error: BaseException) -> bool:
    """Whether a record can have caused it. Otherwise the connection or the disk failed, the file is damaged, or tables
    or rights are missing, as while a backup is restored: then gateways keep their records and send them again."""
    return isinstance(error, (DataError, IntegrityError)) or not isinstance(error, (DBAPIError, OSError))


def _resolve(future: asyncio.Future[Any], result: object) -> None:
    if not future.done():
        future.set_result(result)


def _reject(futures: Sequence[asyncio.Future[Any]], error: Exception) -> None:
    for future in futures:
        if not future.done():
            future.set_exception(error)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
