"""The request log's entry point: what the request path calls, and what the process runs and stops."""

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import structlog

from shoal.core.access import KeyIdentity
from shoal.metering.meter import Meter, milliseconds
from shoal.requestlog.bucket import BucketDown, BucketStore
from shoal.requestlog.capture import OVERHEAD, Capture, CaptureBudget
from shoal.requestlog.entry import LogEntry
from shoal.requestlog.erase import Erased, erase_tenant, erase_user, sweep
from shoal.requestlog.logkeys import LogKeys
from shoal.requestlog.query import Found, LogQuery, Newest, newest, written
from shoal.requestlog.store import Folder, LogStore
from shoal.requestlog.writer import LogFileWriter

log = structlog.get_logger()

UPLOAD_SECONDS: Final = 5.0
SWEEP_SECONDS: Final = 3600.0
CLOCK_STEP_SECONDS: Final = 6 * 3600.0
STOP_SECONDS: Final = 15.0
"""Time limit of a stop: once for the writer, and once more for the bucket."""
READ_SECONDS: Final = 8.0
"""Time to read one page; the page is marked incomplete if it was not enough."""
_NOT_LOGGED: Final = ("externalId", "requestId", "plan", "gateway", "admittedAt")
"""Fields of the usage record."""

Days = Callable[[], Mapping[str, int] | None]
"""retentionDays by tenant; None while the Tenants are not known."""


class LogSettings(Protocol):
    """Settings of the request log, supplied by the process that runs it. A part of `gateway.settings.GatewaySettings`,
    which documents each field."""

    @property
    def log_dir(self) -> Path: ...
    @property
    def log_max_bytes(self) -> int: ...
    @property
    def log_url(self) -> str: ...
    @property
    def log_secret_dir(self) -> Path | None: ...
    @property
    def log_key_dir(self) -> Path | None: ...
    @property
    def log_queue_bytes(self) -> int: ...
    @property
    def log_entry_bytes(self) -> int: ...
    @property
    def log_rotate_bytes(self) -> int: ...
    @property
    def log_rotate_seconds(self) -> float: ...
    @property
    def body_seconds(self) -> float: ...
    @property
    def hold_seconds(self) -> float: ...
    @property
    def request_seconds(self) -> float: ...


class RequestLogger:
    """The request log of this gateway; create it in the event loop. Nothing is opened before the first entry. `gateway`
    is part of the file names."""

    def __init__(self, settings: LogSettings, *, gateway: str = "gateway", days: Days = lambda: None) -> None:
        """Raises ValueError if LOG_URL is not a bucket."""
        self._settings = settings
        self._days = days
        self.gateway = gateway or "gateway"
        self.budget = CaptureBudget(settings.log_queue_bytes)
        self.keys = LogKeys(settings.log_key_dir)
        self.folder = Folder(settings.log_dir)
        self.bucket = BucketStore(settings.log_url, settings.log_secret_dir) if settings.log_url else None
        self.writer = LogFileWriter(
            self.folder,
            self.keys,
            self.budget,
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
        self._stored_days: dict[str, int] = {}
        self._bucket_error: str | None = None

    # --- the request path -------------------------------------------------------------------------------------------

    def begin(self, identity: KeyIdentity, key_hash: str, raw: bytes | None, fields: dict[str, Any]) -> Capture | None:
        """Begins the capture of an accepted request; `raw` and `fields` are those of `Capture.requested`. The caller
        must pass the capture to `end` or `forget`. None: the request's tenant has no `logging`; or the memory budget is
        used up or the capture failed, both of which are counted."""
        logging = identity.logging
        if logging is None:
            return None
        if not self.budget.take(OVERHEAD):
            self.writer.stats.dropped["memory"] += 1
            return None
        capture = Capture(self.budget, logging, key_hash, self._settings.log_entry_bytes)
        try:
            capture.requested(raw, fields)
        except Exception as error:
            # The log must never fail a request. The error's text may contain parts of the body, so it is not logged.
            log.error("request log: an entry failed", tenant=identity.tenant, error=type(error).__name__)
            self.writer.stats.dropped["error"] += 1
            self.budget.leave(capture.size)
            return None
        return capture

    def forget(self, capture: Capture) -> None:
        """Discards the capture of a request that was not served."""
        self.budget.leave(capture.size)

    def end(self, capture: Capture, meter: Meter, now: KeyIdentity | None) -> None:
        """Passes the entry of an ended request to the writer. `now` is the key's current identity: if its tenant
        disabled the log meanwhile, nothing is logged."""
        logging, full = capture.logging, capture.full
        if now is not None:
            if now.logging is None:
                self.budget.leave(capture.size)
                return
            logging, full = now.logging, full and now.logging.mode == "Full"
        first, held = meter.seconds_to_first_byte, meter.held_seconds
        meta: dict[str, Any] = {
            # These two come first, in this order: `query.py` reads them by position.
            "time": written(meter.fields["admittedAt"]),
            "id": meter.id,
            "user": capture.user,
            **meter.fields,
            "outcome": meter.outcome,
            "status": meter.status,
            "error": capture.error,
            **meter.tokens(),
            "countSource": meter.count_source,
            "attempts": meter.attempts,
            "durationMs": milliseconds(meter.seconds),
            "ttftMs": None if first is None else milliseconds(first),
            "holdMs": None if held is None else milliseconds(held),
        }
        for name in _NOT_LOGGED:
            meta.pop(name, None)
        meta["gateway"] = self.gateway
        self.writer.put(LogEntry(meter.tenant, logging, meta, capture.take() if full else None, capture.size))

    # --- reading and deleting ---------------------------------------------------------------------------------------

    async def newest(self, query: LogQuery, *, everywhere: bool) -> Found:
        """The newest entries of this gateway's own folder; with `everywhere` also of the bucket. Raises OSError."""
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
            except BucketDown as error:  # the gateways' entries are shown all the same
                parts.append(Found(unreadable=[str(error.strerror)]))
        return merged(parts, query.limit)

    async def erase(self, tenant: str, user: str | None, *, everywhere: bool) -> Erased:
        """Deletes this gateway's entries of a tenant, or of one of its users; with `everywhere` also in the bucket.
        Entries of running requests are written later and stay. Raises OSError."""
        await asyncio.wrap_future(self.writer.close_files(tenant))
        loop = asyncio.get_running_loop()
        erased = await loop.run_in_executor(self._keeper, self._erase, tenant, user, everywhere)
        await asyncio.wrap_future(self.writer.recount())
        log.info("request log: deleted", tenant=tenant, one_user=user is not None, files=erased.files)
        return erased

    def _stores(self, everywhere: bool) -> list[LogStore]:
        return [self.folder, self.bucket] if everywhere and self.bucket is not None else [self.folder]

    def _newest(self, store: LogStore, query: LogQuery, longest: float, until: float) -> Found:
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
        """Uploads finished files to the bucket and deletes old ones, until cancelled."""
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
        """Writes the remaining entries, and uploads finished files as far as there is time."""
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
                        if days is not None and self._stored_days.get(tenant) != days:
                            bucket.keep_retention(tenant, days)
                            self._stored_days[tenant] = days
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
            # If the clock is wrong, all files may look old, and a deletion is final: wait an hour.
            log.warning("request log: the clock was set; old files are deleted in the next sweep")
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
    """Merges the results of several stores into one page."""
    # If a store has more entries than it returned, its entries below the last returned one are unknown.
    lower_bound = max((part.lines[-1][0] for part in parts if part.more and part.lines), default=("", ""))
    page = Newest(limit)
    for part in parts:
        for place, line in part.lines:
            if place >= lower_bound:
                page.add(place, line)
    return Found(
        page.lines(),
        page.more or any(part.more for part in parts),
        [file for part in parts for file in part.unreadable],
        any(part.incomplete for part in parts),
    )
