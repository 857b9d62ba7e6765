"""Ships the spool to the ledger: at least once, in the order of the rows, soon after each commit.

The ledger answers after its commit, and only then is a batch marked as shipped. A batch that was sent and not marked
is sent again; the ledger recognises its rows by (source, id). Nothing is lost while the ledger is unavailable: rows
wait in the spool.
"""

import asyncio
import contextlib
import random
import sqlite3
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Final, TypeVar

import aiohttp
import orjson
import pydantic
import structlog
import zstandard

from shoal.api import names
from shoal.api.ledger import BatchAnswer
from shoal.metering.spool import SpoolUnavailable, UsageSpool
from shoal.metering.spoolfile import is_damage
from shoal.metering.spoolreader import Batches, SpoolBatch
from shoal.net.tls import NoCertificate, TLSCredentials, dial, ledger_name

log = structlog.get_logger()
_T = TypeVar("_T")

MOST_ROWS: Final = 1000
MOST_BYTES: Final = 1024 * 1024
"""Most bytes of one batch, before compression."""
LINGER_SECONDS: Final = 0.05
"""How long the first row of a batch waits for further rows, and the pause between batches while rows arrive."""
ANSWER_SECONDS: Final = 30.0
"""Longest time that the ledger may take to commit a batch."""
CONNECT_SECONDS: Final = 5.0
BACKOFF_FIRST: Final = 0.25
BACKOFF_MOST: Final = 10.0
_REFUSALS: Final = frozenset({400, 413, 422})
_LONGEST_REFUSAL: Final = 4096
_COMPRESS_FROM: Final = 4096
"""Bytes from which a batch is compressed. For a smaller batch, this would save no more than the header costs."""


class NotTaken(Exception):
    """The ledger did not take a batch. The message is the reason; the same reason always has the same text."""


class BatchRefused(NotTaken):
    """The ledger refused the content of the batch: sending it again would fail too."""


@dataclass(slots=True)
class ShipperStats:
    """Monotonic counters, read by the metrics."""

    rows: int = 0
    batches: int = 0
    bytes: int = 0
    sent_bytes: int = 0
    """Bytes on the wire, compressed, including failed attempts."""
    known: int = 0
    """Rows that the ledger already had."""
    quarantined: int = 0
    """Rows that the ledger quarantined: it could not read them, or did not accept them as this gateway's own."""
    failures: int = 0


class Shipper:
    """Ships rows of the spool to the ledger; `run` ships until it is cancelled. `keys` are tried in order: the ledger
    may not know the newest install key yet, or may no longer know the previous one."""

    def __init__(
        self,
        spool: UsageSpool,
        url: str,
        keys: Callable[[], Iterable[str]],
        credentials: TLSCredentials | None = None,
        *,
        token: Callable[[], str] = lambda: "",
    ) -> None:
        """`token` returns the token of this gateway's pod, which proves the rows' sender; empty: there is none."""
        self.stats = ShipperStats()
        self.error: str | None = None
        """Why the last attempt failed; None while shipping works."""
        self.oldest: datetime | None = None
        """Creation time of the oldest row that the ledger does not have; None: it has all rows that were read."""
        self._spool = spool
        self._url = f"{url.rstrip('/')}{names.RECORDS_PATH}"
        self._keys = keys
        self._credentials, self._server_name = credentials, ledger_name(url)
        self._token = token
        self._accepted_key: str | None = None
        self._shipped = 0
        self._max_rows = MOST_ROWS
        """Most rows of the next batch: fewer while the shipper searches for a row that the ledger refuses."""
        self._opened_times = 0
        self._rows = asyncio.Event()
        self._hurry = asyncio.Event()
        self._progress = asyncio.Event()
        self._error_since: float | None = None
        self._compressor = zstandard.ZstdCompressor(level=1)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shipper")

    @property
    def unshipped(self) -> int:
        """Rows on disk that the ledger does not have."""
        return max(0, self._spool.last_seq - self._shipped)

    def behind_seconds(self) -> float:
        """Age of the oldest row that the ledger does not have; 0 when it has all."""
        # Never negative: the clock may have been set back since.
        return 0.0 if self.oldest is None else max(0.0, (datetime.now(UTC) - self.oldest).total_seconds())

    def trouble(self) -> str | None:
        """A message for people: the error, for how long, and how many rows wait; None while shipping works."""
        if self.error is None or self._error_since is None:
            return None
        seconds = time.monotonic() - self._error_since
        return f"{self.error}, for {seconds:.0f} s; {self.unshipped} rows wait in the spool"

    async def run(self) -> None:
        """Ships forever, whatever state the ledger is in. Raises only cancellation."""
        await self._spool.opened()
        self._shipped = self._spool.shipped
        timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS, connect=CONNECT_SECONDS)
        batches: Batches | None = None
        try:
            async with aiohttp.ClientSession(timeout=timeout) as session:
                while True:
                    try:
                        if batches is None or self._opened_times != self._spool.opened_times:
                            if batches is not None:
                                batches.close()
                                batches = None
                            self._opened_times = self._spool.opened_times
                            batches = await self._open()
                            self._shipped = self._spool.shipped
                        await self._next(session, batches)
                    except Exception:
                        # Serving must go on whatever fails here; the rows are safe in the spool.
                        log.exception("shipping failed")
                        self._failed("shipping failed; the log has the error")
                        await self._pause(BACKOFF_MOST)
        finally:
            self._thread.shutdown(wait=True)
            if batches is not None:
                batches.close()

    async def drain(self, seconds: float) -> bool:
        """Waits until all rows are shipped; call it when no more rows come, while `run` still runs. Returns True when
        the ledger has all rows, False if it does not have them within `seconds`."""
        self._hurry.set()
        self._rows.set()
        with contextlib.suppress(TimeoutError, SpoolUnavailable):
            async with asyncio.timeout(seconds):
                await self._spool.flush()
                while self.unshipped:
                    self._progress.clear()
                    await self._progress.wait()
        if self.unshipped:
            log.warning("rows stay in the spool until the next start", rows=self.unshipped, error=self.error)
        return not self.unshipped

    async def _open(self) -> Batches:
        while True:
            try:
                return await self._in_thread(Batches, self._spool.path)
            except sqlite3.Error as error:
                self._failed(f"the spool cannot be read: {error}")
                await asyncio.sleep(BACKOFF_MOST)

    async def _next(self, session: aiohttp.ClientSession, batches: Batches) -> None:
        """Ships one batch, or waits for rows."""
        self._rows.clear()
        self._spool.wake_at_rows(self._rows.set)
        began = time.monotonic()
        try:
            batch, body = await self._in_thread(self._read, batches)
        except sqlite3.Error as error:
            self._failed(f"the spool cannot be read: {error}")
            if is_damage(error):
                self._spool.damaged(str(error))
            await asyncio.sleep(BACKOFF_FIRST)
            return
        if batch is None:
            self.oldest = None
            self._progress.set()
            await self._rows.wait()
            if not self._hurry.is_set():
                await asyncio.sleep(LINGER_SECONDS)
            return
        self.oldest = batch.oldest
        try:
            await self._ship(session, batch, body)
        except BatchRefused as error:
            self._failed(str(error))
            await self._quarantine_refused(session, batches, batch, str(error))
            return
        if batch.rows < MOST_ROWS and len(batch.body) < MOST_BYTES // 2 and not self._hurry.is_set():
            # The batch had all rows that waited: after a pause, the next batch has more than one row. The pause counts
            # from the start of this batch, because a row that came right after it has already waited for the ledger's
            # answer.
            await asyncio.sleep(max(0.0, began + LINGER_SECONDS - time.monotonic()))

    def _read(self, batches: Batches) -> tuple[SpoolBatch | None, bytes]:
        batch = batches.after(self._shipped, rows=self._max_rows, size=MOST_BYTES)
        if batch is None:
            return None, b""
        return batch, self._compressor.compress(batch.body) if len(batch.body) >= _COMPRESS_FROM else b""

    async def _quarantine_refused(
        self, session: aiohttp.ClientSession, batches: Batches, batch: SpoolBatch, why: str
    ) -> None:
        """Finds the row that the ledger refuses in a batch and quarantines it: one row must not block the rows behind
        it. If the ledger does not accept the next row either, the row is not the cause."""
        broken = await self._in_thread(batches.broken, self._shipped, batch.last)
        if not broken and batch.rows > 1:
            self._max_rows = max(1, batch.rows // 2)
            return
        if not broken:
            behind = await self._in_thread(partial(batches.after, batch.last, rows=1, size=MOST_BYTES))
            try:
                if behind is None or not (await self._send(session, behind.body, compressed=False)):
                    raise NotTaken(why)
            except NotTaken:
                await self._pause(BACKOFF_MOST)
                return
            broken = [(batch.last, f"the ledger refuses it: {why}")]
        try:
            await self._spool.quarantine(broken)
        except SpoolUnavailable:
            await self._pause(BACKOFF_MOST)

    async def _ship(self, session: aiohttp.ClientSession, batch: SpoolBatch, compressed: bytes) -> None:
        """Sends a batch until the ledger has it. Raises BatchRefused."""
        backoff = BACKOFF_FIRST
        while True:
            try:
                taken = await self._send(session, compressed or batch.body, compressed=bool(compressed))
                break
            except BatchRefused:
                raise
            except NotTaken as error:
                self._failed(str(error))
            delay = backoff * random.uniform(0.5, 1.0)  # noqa: S311 - so that gateways do not all retry at once
            backoff = min(backoff * 2, BACKOFF_FIRST if self._hurry.is_set() else BACKOFF_MOST)
            await self._pause(delay)
        # Marked only now: marked rows are never sent again.
        self._shipped = batch.last
        self._spool.mark(batch.last)
        self._max_rows = min(MOST_ROWS, self._max_rows * 2)
        if not self.unshipped:
            self.oldest = None
        stats = self.stats
        stats.rows += batch.rows
        stats.batches += 1
        stats.bytes += len(batch.body)
        stats.known += taken.known
        if taken.aside:
            stats.quarantined += taken.aside
            log.error(
                "the ledger quarantined records; its list of quarantined records has the reasons", rows=taken.aside
            )
        if self.error is not None:
            log.info("the ledger takes records again", rows_that_wait=self.unshipped)
            self.error = self._error_since = None
        self._progress.set()

    async def _send(self, session: aiohttp.ClientSession, body: bytes, *, compressed: bool) -> BatchAnswer:
        """
        Raises:
            NotTaken: the ledger did not take the rows, or did not confirm it.
        """
        keys = list(self._keys())
        if not keys:
            raise NotTaken("there is no install key yet")
        if self._accepted_key in keys:
            keys.sort(key=lambda key: key != self._accepted_key)
        try:
            secured = dial(self._credentials, self._server_name)
        except NoCertificate as none:
            raise NotTaken(str(none)) from None
        headers = {"content-type": "application/json"}
        if compressed:
            headers["content-encoding"] = "zstd"
        if token := self._token():
            headers[names.HEADER_POD_TOKEN] = token
        refused = ""
        for key in keys:
            self.stats.sent_bytes += len(body)
            try:
                async with session.post(
                    self._url,
                    data=body,
                    headers={**headers, "authorization": f"Bearer {key}"},
                    allow_redirects=False,
                    **secured,
                ) as answer:
                    if answer.status in (401, 403):
                        if answer.status == 403:  # the key is valid; something else is wrong
                            refused = refused or await _message(answer)
                        continue
                    if answer.status in _REFUSALS:
                        raise BatchRefused(f"the ledger answers with status {answer.status}")
                    if answer.status != 200:
                        raise NotTaken(f"the ledger answers with status {answer.status}")
                    taken = BatchAnswer.model_validate_json(await answer.read())
            except TimeoutError:
                raise NotTaken("the ledger does not answer in time") from None
            except aiohttp.ClientConnectorError:
                raise NotTaken("the ledger is not reachable") from None
            except aiohttp.ClientError as error:
                raise NotTaken(f"the connection to the ledger failed ({type(error).__name__})") from None
            except pydantic.ValidationError:
                raise NotTaken("the answer is not a ledger's") from None
            self._accepted_key = key
            return taken
        if refused:
            raise NotTaken(f"the ledger does not take this gateway's records: {refused}")
        raise NotTaken("the ledger knows none of this gateway's install keys")

    def _failed(self, reason: str) -> None:
        self.stats.failures += 1
        if self._error_since is None:
            self._error_since = time.monotonic()
        if self.error != reason:
            log.warning("records are not shipped", reason=reason, rows_that_wait=self.unshipped)
        self.error = reason

    async def _pause(self, seconds: float) -> None:
        """Waits; a call of `drain` during the wait ends it."""
        if self._hurry.is_set():
            await asyncio.sleep(seconds)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._hurry.wait()

    async def _in_thread(self, function: Callable[..., _T], *args: object) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)


async def _message(answer: aiohttp.ClientResponse) -> str:
    """The message of the ledger's refusal, or its status."""
    try:
        body = orjson.loads(await answer.content.read(_LONGEST_REFUSAL))
        return str(body["error"]["message"])[:300]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return f"status {answer.status}"
