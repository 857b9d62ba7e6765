"""The ledger's store: one thread writes, a few read. Nobody but this writes to the database.

Batches that arrive while a commit is under way go into the next one together (group commit), so the number of syncs
does not grow with the number of gateways. Nothing waits in memory for a database that is away: callers are told at
once, and gateways keep their records in their spools.
"""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import structlog
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, InterfaceError, InternalError, OperationalError

from shoal.api.ledger import Taken
from shoal.ledger import ingest
from shoal.ledger.database import Busy, Database, Kind, Unavailable, reason
from shoal.ledger.parse import Incoming
from shoal.ledger.sums import Changes, Cost, free

__all__ = ["Busy", "Store", "Unavailable"]

log = structlog.get_logger()

T = TypeVar("T")

MOST_RECORDS: Final = 10_000
"""Records in one transaction, where single batches are not larger."""
RETRY_SECONDS: Final = 1.0
"""Between two tries to reach a database that is away."""


@dataclass(slots=True)
class Stats:
    """Monotonic counters, read by the metrics."""

    new: int = 0
    known: int = 0
    aside: int = 0
    commits: int = 0
    commit_seconds: float = 0.0
    failures: int = 0


@dataclass(slots=True)
class _Take:
    records: Sequence[Incoming]
    future: asyncio.Future[Taken]


@dataclass(slots=True)
class _Write:
    work: Callable[[Connection], Any]
    then: Callable[[Any], None] | None
    future: asyncio.Future[Any]


@dataclass(slots=True)
class _Jobs:
    """What waits for the writer."""

    queue: deque[_Take | _Write] = field(default_factory=deque[_Take | _Write])
    records: int = 0


class Store:
    """Make and use it in one event loop. `start` returns at once; the writer opens the database, again and again.

    `opened` is called in the event loop after each (re)connection, `committed` after each commit that changed sums, in
    the order of the commits.
    """

    def __init__(
        self,
        url: str,
        *,
        readers: int = 4,
        max_waiting_records: int = 50_000,
        answer_seconds: float = 30.0,
        keep_days: int | None = None,
    ) -> None:
        self.database: Final = Database(url, readers=readers)
        self.stats = Stats()
        self.opened: Callable[[], None] = lambda: None
        self.cost: Cost = free
        """Asked in the writer's thread, for what gateways count in money."""
        self.committed: Callable[[Changes], None] = lambda _: None
        self._error: str | None = "the database is being opened"
        self._jobs = _Jobs()
        self._most = max_waiting_records
        self._answer_seconds = answer_seconds
        self._keep_ms = None if keep_days is None else keep_days * 86_400_000
        self._changed = threading.Condition()
        self._stopping = False
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="ledger-writer", daemon=True)
        self._readers = ThreadPoolExecutor(readers, thread_name_prefix="ledger-reader")

    @property
    def kind(self) -> Kind:
        return self.database.kind

    @property
    def error(self) -> str | None:
        """Why nothing can be kept; None while all is well."""
        return self._error

    @property
    def waiting(self) -> int:
        """Records that wait for their commit."""
        return self._jobs.records

    def start(self) -> None:
        """Starts the writer."""
        self._thread.start()

    async def stop(self) -> None:
        """Commits what waits, and closes the database."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self._readers.shutdown)
        self.database.close()

    async def take(self, records: Sequence[Incoming]) -> Taken:
        """Keeps records; they are committed when it returns. The same ones again have no effect.

        Raises:
            Unavailable: nothing was kept, or it is not known: send them again.
        """
        if self._jobs.records + len(records) > self._most and self._jobs.records:
            raise Unavailable(f"{self._jobs.records} records wait for their commit already")
        return await self._submit(_Take(records, self._loop.create_future()), len(records))

    async def write(self, work: Callable[[Connection], T], then: Callable[[T], None] | None = None) -> T:
        """What `work` returns after its transaction was committed. `work` runs in the writer's thread, alone; `then`
        gets the result in the event loop, in its order among the commits.

        Raises:
            Unavailable: nothing was written, or it is not known.
        """
        return await self._submit(_Write(work, then, self._loop.create_future()), 0)

    async def read(self, work: Callable[[Connection], T], timeout: float | None = None) -> T:
        """What `work` returns, of one consistent state; it runs in a reader's thread.

        Raises:
            Unavailable: the database is away, or too slow.
        """
        if self._error is not None and self.stats.commits == 0:
            raise Unavailable(self._error)  # tables may not be there yet
        future = self._loop.run_in_executor(self._readers, self._read, work)
        try:
            async with asyncio.timeout(timeout or self._answer_seconds):
                return await future
        except TimeoutError:
            raise Unavailable("the database did not answer in time: ask for less, or again") from None

    def _read(self, work: Callable[[Connection], T]) -> T:
        try:
            with self.database.reading.connect() as connection, connection.begin():
                return work(connection)
        except DBAPIError as error:
            raise Unavailable(reason(error)) from error

    async def _submit(self, job: _Take | _Write, records: int) -> Any:
        if self._error is not None:
            raise Unavailable(self._error)
        with self._changed:
            if self._stopping:
                raise Unavailable("the ledger stops")
            self._jobs.queue.append(job)
            self._jobs.records += records
            self._changed.notify()
        try:
            async with asyncio.timeout(self._answer_seconds):
                return await job.future
        except TimeoutError:
            raise Unavailable("the database did not answer in time") from None

    # --- the writer thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with contextlib.ExitStack() as stack:
                try:
                    connection = self.database.open(stack)
                except Exception as error:
                    self._fail(error)
                    if self._rest():
                        return
                    continue
                self._well()
                self._notify(self.opened)
                if self._serve(connection):
                    return
            if self._rest():
                return

    def _serve(self, connection: Connection) -> bool:
        """Works until the store stops (True) or the database fails (False)."""
        while True:
            jobs = self._next()
            if not jobs:
                return True
            began = time.monotonic()
            try:
                if isinstance(jobs[0], _Write):
                    self._write(connection, jobs[0])
                else:
                    self._take(connection, [job for job in jobs if isinstance(job, _Take)])
            except Exception as error:
                if not _is_away(error):
                    log.exception("the ledger's writer failed")
                self._fail(error)
                self._refuse(jobs)
                return False
            self.stats.commits += 1
            self.stats.commit_seconds += time.monotonic() - began

    def _next(self) -> list[_Take | _Write]:
        """Waits for work. Takes are handed out together, a write alone; nothing when the store has stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs.queue or self._stopping)
            jobs: list[_Take | _Write] = []
            records = 0
            queue = self._jobs.queue
            while queue:
                job = queue[0]
                if isinstance(job, _Write):
                    if not jobs:
                        jobs.append(queue.popleft())
                    break
                if jobs and records + len(job.records) > MOST_RECORDS:
                    break
                records += len(job.records)
                jobs.append(queue.popleft())
            self._jobs.records -= records
            return jobs

    def _write(self, connection: Connection, job: _Write) -> None:
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

    def _take(self, connection: Connection, jobs: list[_Take]) -> None:
        batches: Sequence[Sequence[Incoming]] = [job.records for job in jobs]
        now = _now_ms()
        try:
            with connection.begin():
                taken, changes = ingest.write(connection, batches, now, self._keep_ms, self.cost)
        except Exception as error:
            if _is_away(error):
                raise
            # One record that no check foresaw must not keep all others out for ever.
            log.error("records that the database does not take are kept aside", error=reason(error))
            batches = ingest.one_by_one(connection, batches, now, _is_away)
            with connection.begin():
                taken, changes = ingest.write(connection, batches, now, self._keep_ms, self.cost)
        for each in taken:
            self.stats.new += each.new
            self.stats.known += each.known
            self.stats.aside += each.aside
        if changes:
            self._notify(self.committed, changes)
        for job, each in zip(jobs, taken, strict=True):
            self._notify(_resolve, job.future, each)

    def _well(self) -> None:
        if self._error is not None:
            log.info("the ledger takes records", database=self.database.name)
        self._error = None

    def _fail(self, error: BaseException) -> None:
        self.stats.failures += 1
        text = str(error) if isinstance(error, Unavailable) else reason(error)
        if self._error != text:
            log.error("the ledger cannot keep records", database=self.database.name, error=text)
        self._error = text

    def _rest(self) -> bool:
        """Refuses what waits, then waits before the next try; True when the store stops."""
        with self._changed:
            jobs = [*self._jobs.queue]
            self._jobs = _Jobs()
            self._refuse(jobs)
            self._changed.wait_for(lambda: self._stopping, RETRY_SECONDS)
            return self._stopping

    def _refuse(self, jobs: Sequence[_Take | _Write]) -> None:
        if jobs:
            self._notify(_reject, [job.future for job in jobs], Unavailable(self._error or "the ledger stops"))

    def _notify(self, function: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(function, *args)


def _is_away(error: BaseException) -> bool:
    """Whether the connection or the disk failed, not the statement."""
    if isinstance(error, DBAPIError):
        return error.connection_invalidated or isinstance(error, (OperationalError, InterfaceError, InternalError))
    return isinstance(error, OSError)


def _resolve(future: asyncio.Future[Any], result: object) -> None:
    if not future.done():
        future.set_result(result)


def _reject(futures: Sequence[asyncio.Future[Any]], error: Exception) -> None:
    for future in futures:
        if not future.done():
            future.set_exception(error)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
