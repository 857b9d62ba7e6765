"""All of the request log together: what the request path calls, and what the process runs and stops."""

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

import structlog

from shoal.core.access import Identity
from shoal.gateway.meter import Meter
from shoal.gateway.requestlog.bucket import Bucket, BucketDown
from shoal.gateway.requestlog.capture import OVERHEAD, Capture, Room
from shoal.gateway.requestlog.entry import Job
from shoal.gateway.requestlog.erase import Erased, erase_tenant, erase_user, sweep
from shoal.gateway.requestlog.logkeys import LogKeys
from shoal.gateway.requestlog.query import Found, Newest, Query, newest, written
from shoal.gateway.requestlog.store import Folder, Store
from shoal.gateway.requestlog.writer import Writer
from shoal.gateway.settings import GatewaySettings

log = structlog.get_logger()

UPLOAD_SECONDS: Final = 5.0
SWEEP_SECONDS: Final = 3600.0
CLOCK_STEP_SECONDS: Final = 6 * 3600.0
STOP_SECONDS: Final = 15.0
"""For the writer, and again for the bucket."""
READ_SECONDS: Final = 8.0
"""For one page; what was not read then is said to be missing."""
_NOT_LOGGED: Final = frozenset({"externalId", "requestId", "plan", "gateway", "admittedAt"})

Days = Callable[[], Mapping[str, int] | None]
"""retentionDays by tenant; None while the Tenants are not known."""


class RequestLog:
    """`gateway` names this gateway's files. Make it in the event loop; nothing is opened before the first entry."""

    def __init__(self, settings: GatewaySettings, *, gateway: str = "gateway", days: Days = lambda: None) -> None:
        """Raises ValueError when LOG_URL is no bucket."""
        self._settings = settings
        self._days = days
        self.gateway = gateway or "gateway"
        self.room = Room(settings.log_queue_bytes)
        self.keys = LogKeys(settings.log_key_dir)
        self.folder = Folder(settings.log_dir)
        self.bucket = Bucket(settings.log_url, settings.log_secret_dir) if settings.log_url else None
        self.writer = Writer(
            self.folder,
            self.keys,
            self.room,
            gateway=self.gateway,
            entry_bytes=settings.log_entry_bytes,
            rotate_bytes=settings.log_rotate_bytes,
            rotate_seconds=settings.log_rotate_seconds,
            max_bytes=settings.log_max_bytes,
        )
        self.upload_failures = 0
        self._readers = ThreadPoolExecutor(2, "request-log-read")
        self._keeper = ThreadPoolExecutor(1, "request-log-keep")
        self._clock = time.time() - time.monotonic()
        self._said_days: dict[str, int] = {}
        self._bucket_error: str | None = None

    # --- the request path -------------------------------------------------------------------------------------------

    def begin(self, identity: Identity, key_hash: str, raw: bytes | None, fields: dict[str, Any]) -> Capture | None:
        """For a request that was accepted, of a tenant with `logging`; `raw` and `fields` as `Capture.asked` takes
        them. None: there is no room, which is counted. Whoever gets a capture calls `end`."""
        logging = identity.logging
        if logging is None:
            return None
        if not self.room.take(OVERHEAD):
            self.writer.stats.dropped["memory"] += 1
            return None
        capture = Capture(self.room, logging, key_hash, self._settings.log_entry_bytes)
        try:
            capture.asked(raw, fields)
        except Exception as error:
            # The log never holds anybody up. The error's text may hold what the body holds.
            log.error("request log: an entry failed", tenant=identity.tenant, error=type(error).__name__)
            self.writer.stats.dropped["error"] += 1
            self.room.leave(capture.size)
            return None
        return capture

    def forget(self, capture: Capture) -> None:
        """The request was not served."""
        self.room.leave(capture.size)

    def end(self, capture: Capture, meter: Meter, now: Identity | None) -> None:
        """The request is over. `now` is whose the key is at this time: who switched the log off meanwhile means it."""
        logging, full = capture.logging, capture.full
        if now is not None:
            if now.logging is None:
                self.room.leave(capture.size)
                return
            logging, full = now.logging, full and now.logging.mode == "Full"
        first, held = meter.seconds_to_first_byte, meter.held_seconds
        meta: dict[str, Any] = {
            # These two come first, in this order: `query.py` reads them by position.
            "time": written(meter.said["admittedAt"]),
            "id": meter.id,
            "user": capture.user,
            **{name: value for name, value in meter.said.items() if name not in _NOT_LOGGED},
            "outcome": meter.outcome,
            "status": meter.status,
            "error": capture.error,
            **meter.tokens(),
            "countSource": meter.count_source,
            "attempts": meter.attempts,
            "durationMs": round(meter.seconds * 1000, 3),
            "ttftMs": None if first is None else round(first * 1000, 3),
            "holdMs": None if held is None else round(held * 1000, 3),
            "gateway": self.gateway,
        }
        self.writer.put(Job(meter.tenant, logging, meta, capture.take() if full else None, capture.size))

    # --- reading and deleting ---------------------------------------------------------------------------------------

    async def newest(self, query: Query, *, everywhere: bool) -> Found:
        """The latest entries of this gateway's own folder; `everywhere`: of the bucket too. Raises OSError."""
        loop = asyncio.get_running_loop()
        until = time.monotonic() + READ_SECONDS
        stores = self._stores(everywhere)
        settings = self._settings
        longest = settings.hold_seconds + settings.request_seconds + settings.body_seconds
        parts: list[Found] = []
        for store in stores:
            read = partial(self._newest, store, query, longest, until)
            try:
                parts.append(await loop.run_in_executor(self._readers, read))
            except BucketDown as error:  # what the gateways have is shown all the same
                parts.append(Found(unreadable=[str(error.strerror)]))
        return merged(parts, query.limit)

    async def erase(self, tenant: str, user: str | None, *, everywhere: bool) -> Erased:
        """Deletes what this gateway has of a tenant, or of one of its users; `everywhere`: in the bucket too. Entries
        of requests that still run come later, and stay. Raises OSError."""
        await asyncio.wrap_future(self.writer.close_files(tenant))
        loop = asyncio.get_running_loop()
        erased = await loop.run_in_executor(self._keeper, self._erase, tenant, user, everywhere)
        await asyncio.wrap_future(self.writer.recount())
        log.info("request log: deleted", tenant=tenant, one_user=user is not None, files=erased.files)
        return erased

    def _stores(self, everywhere: bool) -> list[Store]:
        return [self.folder, self.bucket] if everywhere and self.bucket is not None else [self.folder]

    def _newest(self, store: Store, query: Query, longest: float, until: float) -> Found:
        self.keys.refresh()
        return newest(store, query, self.keys, longest=longest, until=until)

    def _erase(self, tenant: str, user: str | None, everywhere: bool) -> Erased:
        self.keys.refresh()
        stores = self._stores(everywhere)
        total = Erased(entries=None if user is None else 0)
        for store in stores:
            if user is None:
                part = erase_tenant(store, tenant, self.writer.is_open)
            else:
                part = erase_user(store, self.keys, tenant, user, self.writer.is_open)
                total.entries = (total.entries or 0) + (part.entries or 0)
            total.files += part.files
            total.unreadable += part.unreadable
        return total

    # --- the process ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Finished files to the bucket, old ones away; until cancelled."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._keeper, self._begin)
        sweep_at = loop.time()
        while True:
            if self.bucket is not None:
                await loop.run_in_executor(self._keeper, self._upload)
            days = self._days()
            if days is not None and loop.time() >= sweep_at:
                sweep_at = loop.time() + SWEEP_SECONDS
                await loop.run_in_executor(self._keeper, self._sweep, dict(days))
            await asyncio.sleep(UPLOAD_SECONDS)

    async def stop(self) -> None:
        """Writes what ended, and takes finished files to the bucket as far as there is time."""
        await asyncio.to_thread(self.writer.stop, STOP_SECONDS)
        if self.bucket is not None:
            loop = asyncio.get_running_loop()
            try:
                async with asyncio.timeout(STOP_SECONDS):
                    await loop.run_in_executor(self._keeper, self._upload)
            except TimeoutError:
                log.warning("request log: not all files are in the bucket; they stay in the folder")
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._keeper.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        try:
            self.folder.clean()
            if self.folder.root.is_dir():
                self.writer.recount()
        except OSError as error:
            log.warning("request log: the folder cannot be read", reason=error.strerror)

    def _upload(self) -> None:
        if self.bucket is None:
            return
        folder, bucket = self.folder, self.bucket
        moved = False
        try:
            for tenant in folder.tenants():
                days = folder.retention(tenant)
                for date in folder.dates(tenant):
                    for file in folder.files(tenant, date):
                        if self.writer.is_open(file):
                            continue
                        if days is not None and self._said_days.get(tenant) != days:
                            bucket.keep_retention(tenant, days)
                            self._said_days[tenant] = days
                        bucket.put(file, folder.path(file))
                        folder.remove(file)
                        moved = True
            if self._bucket_error is not None:
                log.info("request log: the bucket takes files again")
            self._bucket_error = None
        except OSError as error:
            self.upload_failures += 1
            why = error.strerror or type(error).__name__
            if why != self._bucket_error:
                log.error("request log: files stay in the folder until the bucket takes them", reason=why)
            self._bucket_error = why
        if moved:
            self.writer.recount()

    def _sweep(self, days: Mapping[str, int]) -> None:
        clock = time.time() - time.monotonic()
        if abs(clock - self._clock) > CLOCK_STEP_SECONDS:
            # If it was set wrongly, everything would look old: what is gone is gone, what waits an hour is not.
            log.warning("request log: the clock was set; old files are deleted at the next turn")
            self._clock = clock
            return
        today = datetime.now(UTC).date()
        for store in self._stores(True):
            try:
                if count := sweep(store, days, today):
                    log.info("request log: old files deleted", files=count)
                    self.writer.recount()
            except OSError as error:
                log.warning("request log: old files are not deleted yet", reason=error.strerror)


def merged(parts: list[Found], limit: int) -> Found:
    """What several places have, as one page."""
    # Where a place has more than it said, nothing is known below its last entry.
    floor = max((part.lines[-1][0] for part in parts if part.more and part.lines), default=("", ""))
    page = Newest(limit)
    for part in parts:
        for place, line in part.lines:
            if place >= floor:
                page.add(place, line)
    return Found(
        page.lines(),
        page.more or any(part.more for part in parts),
        [file for part in parts for file in part.unreadable],
        any(part.incomplete for part in parts),
    )
