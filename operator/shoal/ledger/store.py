"""The ledger's store: one thread writes (`writer.py`), several threads read."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from shoal.api.ledger import BatchAnswer
from shoal.ledger.database import Busy, Database, DatabaseUnavailable, Kind, bounded, reason
from shoal.ledger.parse import Incoming
from shoal.ledger.writer import LedgerWriter, Take, Write

__all__ = ["Busy", "DatabaseUnavailable", "LedgerStore"]

T = TypeVar("T")


class LedgerStore(LedgerWriter):
    """The ledger's `records.Sink`. Create it and use it in one event loop, between `start` and `stop`."""

    def __init__(
        self,
        url: str,
        *,
        readers: int = 4,
        max_waiting_records: int = 50_000,
        answer_seconds: float = 30.0,
        keep_days: int | None = None,
    ) -> None:
        super().__init__(Database(url, readers=readers), keep_days=keep_days)
        self._most = max_waiting_records
        self._answer_seconds = answer_seconds
        self._readers = ThreadPoolExecutor(readers, thread_name_prefix="ledger-reader")

    @property
    def kind(self) -> Kind:
        return self.database.kind

    async def stop(self) -> None:
        """Commits waiting records and closes the database."""
        await self.finish()
        await asyncio.to_thread(self._readers.shutdown)
        self.database.close()

    async def take(self, records: Sequence[Incoming]) -> BatchAnswer:
        """Stores records; they are committed when it returns. Repeating the call has no effect.

        Raises:
            DatabaseUnavailable: nothing was stored, or the result is unknown: send the records again.
        """
        if self.waiting + len(records) > self._most and self.waiting:
            raise DatabaseUnavailable(f"{self.waiting} records wait for their commit already")
        return await self._done(Take(records, asyncio.get_running_loop().create_future()))

    async def write(self, work: Callable[[Connection], T], then: Callable[[T], None] | None = None) -> T:
        """Runs `work` alone in the writer's thread; returns its result after the commit. `then` gets the result in the
        event loop, in the order of commits.

        Raises:
            DatabaseUnavailable: nothing was written, or the result is unknown.
            DBAPIError: the statement was invalid; nothing was written.
        """
        return await self._done(Write(work, then, asyncio.get_running_loop().create_future()))

    async def read(self, work: Callable[[Connection], T], timeout: float | None = None) -> T:
        """Runs `work` in a reader's thread on a consistent snapshot; returns its result.

        Raises:
            DatabaseUnavailable: the database is unavailable or too slow.
        """
        if self.error is not None and self.stats.commits == 0:
            raise DatabaseUnavailable(self.error)  # the tables may not exist yet
        future = asyncio.get_running_loop().run_in_executor(self._readers, self._read, work)
        try:
            async with asyncio.timeout(timeout or self._answer_seconds):
                return await future
        except TimeoutError:
            raise DatabaseUnavailable("the database did not answer in time: ask for less, or again") from None

    def _read(self, work: Callable[[Connection], T]) -> T:
        try:
            with self.database.reading.connect() as connection, connection.begin(), bounded(connection):
                return work(connection)
        except DBAPIError as error:
            raise DatabaseUnavailable(reason(error)) from error

    async def _done(self, job: Take | Write) -> Any:
        self.submit(job)
        try:
            async with asyncio.timeout(self._answer_seconds):
                return await job.future
        except TimeoutError:
            raise DatabaseUnavailable("the database did not answer in time") from None
