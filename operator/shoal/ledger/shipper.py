"""Ships the spool to the ledger: at least once, in the order of the rows, soon after each commit.

A batch is marked as shipped after the ledger's answer, which comes after its commit; what was sent and not marked is
sent again, and the ledger knows it by (source, id). Nothing is lost while the ledger is away: rows wait in the spool.
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
from shoal.api.ledger import Taken
from shoal.ledger.spool import Spool, SpoolUnavailable
from shoal.ledger.spoolfile import is_damage
from shoal.ledger.spoolreader import Batch, Batches
from shoal.net.tls import Credentials, NoCertificate, dial, ledger_name

log = structlog.get_logger()
_T = TypeVar("_T")

MOST_ROWS: Final = 1000
MOST_BYTES: Final = 1024 * 1024
"""Of one batch, before it is compressed."""
LINGER_SECONDS: Final = 0.05
"""After the first row on disk: how long others may join it; from one batch to the next, while rows come, as long."""
ANSWER_SECONDS: Final = 30.0
"""Longest that the ledger may take to commit a batch."""
CONNECT_SECONDS: Final = 5.0
BACKOFF_FIRST: Final = 0.25
BACKOFF_MOST: Final = 10.0
_REFUSALS: Final = frozenset({400, 413, 422})
_LONGEST_REFUSAL: Final = 4096
_COMPRESS_FROM: Final = 4096
"""Bytes. Below it the header would cost as much as is saved."""


class NotTaken(Exception):
    """The ledger did not take a batch. The message says why, in words that stay the same while the reason does."""


class Refused(NotTaken):
    """What is in the batch is the reason: the same again would not be taken either."""


@dataclass(slots=True)
class ShipperStats:
    """Monotonic counters, read by the metrics."""

    rows: int = 0
    batches: int = 0
    bytes: int = 0
    sent_bytes: int = 0
    """On the wire, compressed, tries in vain included."""
    known: int = 0
    """Rows that the ledger had already."""
    aside: int = 0
    """Rows that it could not read, or did not take for this gateway's own, and keeps aside."""
    failures: int = 0


class Shipper:
    """`run` ships until it is cancelled. `keys` are tried in turn: the ledger may not know the newest install key yet,
    or no longer the one before."""

    def __init__(
        self,
        spool: Spool,
        url: str,
        keys: Callable[[], Iterable[str]],
        credentials: Credentials | None = None,
        *,
        token: Callable[[], str] = lambda: "",
    ) -> None:
        """`token` proves to the ledger from which pod the rows come; empty: there is none."""
        self.stats = ShipperStats()
        self.error: str | None = None
        """Why the last try failed; None while all is well."""
        self.oldest: datetime | None = None
        """When the first row was made that the ledger does not have; None: it has all, as far as we looked."""
        self._spool = spool
        self._url = f"{url.rstrip('/')}{names.RECORDS_PATH}"
        self._keys = keys
        self._credentials, self._server_name = credentials, ledger_name(url)
        self._token = token
        self._good_key: str | None = None
        self._shipped = 0
        self._most_rows = MOST_ROWS
        """Of the next batch: fewer while one is looked for that the ledger refuses."""
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
        """For a person: what is wrong, since when, and what waits; None while all is well."""
        if self.error is None or self._error_since is None:
            return None
        seconds = time.monotonic() - self._error_since
        return f"{self.error}, for {seconds:.0f} s; {self.unshipped} rows wait in the spool"

    async def run(self) -> None:
        """Ships, again and again, whatever becomes of the ledger. Raises nothing but cancellation."""
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
                        # Serving goes on whatever is wrong here; rows are safe in the spool meanwhile.
                        log.exception("shipping failed")
                        self._failed("shipping failed; the log says how")
                        await self._pause(BACKOFF_MOST)
        finally:
            self._thread.shutdown(wait=True)
            if batches is not None:
                batches.close()

    async def drain(self, seconds: float) -> bool:
        """Call it when no more rows come, while `run` goes on: True when the ledger has all of them, False when it has
        not within `seconds`."""
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
        """One batch, or a wait for rows."""
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
        except Refused as error:
            self._failed(str(error))
            await self._sift(session, batches, batch, str(error))
            return
        if batch.rows < MOST_ROWS and len(batch.body) < MOST_BYTES // 2 and not self._hurry.is_set():
            # It had all there was: the next one may be more than a row. From its own beginning on, for a row that came
            # right after it has waited for the ledger's answer already.
            await asyncio.sleep(max(0.0, began + LINGER_SECONDS - time.monotonic()))

    def _read(self, batches: Batches) -> tuple[Batch | None, bytes]:
        batch = batches.after(self._shipped, rows=self._most_rows, size=MOST_BYTES)
        if batch is None:
            return None, b""
        return batch, self._compressor.compress(batch.body) if len(batch.body) >= _COMPRESS_FROM else b""

    async def _sift(self, session: aiohttp.ClientSession, batches: Batches, batch: Batch, why: str) -> None:
        """Looks for what the ledger refuses in a batch, and puts it aside: one row must not stop those behind it. Where
        it takes no other row either, it is not the row's fault."""
        broken = await self._in_thread(batches.broken, self._shipped, batch.last)
        if not broken and batch.rows > 1:
            self._most_rows = max(1, batch.rows // 2)
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
            await self._spool.put_aside(broken)
        except SpoolUnavailable:
            await self._pause(BACKOFF_MOST)

    async def _ship(self, session: aiohttp.ClientSession, batch: Batch, compressed: bytes) -> None:
        """Sends a batch until the ledger has it. Raises Refused."""
        backoff = BACKOFF_FIRST
        while True:
            try:
                taken = await self._send(session, compressed or batch.body, compressed=bool(compressed))
                break
            except Refused:
                raise
            except NotTaken as error:
                self._failed(str(error))
            delay = backoff * random.uniform(0.5, 1.0)  # noqa: S311 - so that gateways do not come back all at once
            backoff = min(backoff * 2, BACKOFF_FIRST if self._hurry.is_set() else BACKOFF_MOST)
            await self._pause(delay)
        # Only now: what is marked is never sent again.
        self._shipped = batch.last
        self._spool.mark(batch.last)
        self._most_rows = min(MOST_ROWS, self._most_rows * 2)
        if not self.unshipped:
            self.oldest = None
        stats = self.stats
        stats.rows += batch.rows
        stats.batches += 1
        stats.bytes += len(batch.body)
        stats.known += taken.known
        if taken.aside:
            stats.aside += taken.aside
            log.error("the ledger keeps records aside; its own records say why", rows=taken.aside)
        if self.error is not None:
            log.info("the ledger takes records again", rows_that_wait=self.unshipped)
            self.error = self._error_since = None
        self._progress.set()

    async def _send(self, session: aiohttp.ClientSession, body: bytes, *, compressed: bool) -> Taken:
        """
        Raises:
            NotTaken: it did not take them, or did not say so.
        """
        keys = list(self._keys())
        if not keys:
            raise NotTaken("there is no install key yet")
        if self._good_key in keys:
            keys.sort(key=lambda key: key != self._good_key)
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
                        if answer.status == 403:  # the key is known; something else is wrong
                            refused = refused or await _message(answer)
                        continue
                    if answer.status in _REFUSALS:
                        raise Refused(f"the ledger answers with status {answer.status}")
                    if answer.status != 200:
                        raise NotTaken(f"the ledger answers with status {answer.status}")
                    taken = Taken.model_validate_json(await answer.read())
            except TimeoutError:
                raise NotTaken("the ledger does not answer in time") from None
            except aiohttp.ClientConnectorError:
                raise NotTaken("the ledger is not reachable") from None
            except aiohttp.ClientError as error:
                raise NotTaken(f"the connection to the ledger failed ({type(error).__name__})") from None
            except pydantic.ValidationError:
                raise NotTaken("what answers is no ledger: its answer is not understood") from None
            self._good_key = key
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
        """Waits, but not on when it turns out that there is a hurry."""
        if self._hurry.is_set():
            await asyncio.sleep(seconds)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._hurry.wait()

    async def _in_thread(self, function: Callable[..., _T], *args: object) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)


async def _message(answer: aiohttp.ClientResponse) -> str:
    """What the ledger says of a refusal, or that it says nothing."""
    try:
        said = orjson.loads(await answer.content.read(_LONGEST_REFUSAL))
        return str(said["error"]["message"])[:300]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return f"status {answer.status}"
