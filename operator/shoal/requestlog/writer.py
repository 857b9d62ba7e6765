"""The writer thread: formats entries as lines, joins lines to frames and writes frames to files.

An entry is in the file at most one second after its request ended, and synced to the disk at most five seconds later.
So a SIGKILL loses the entries of the last second, and a lost node those of the last six. Entries that the disk refuses
are dropped and counted: the log never delays serving, and uses no more memory than its budget.
"""

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final, Literal

import structlog

from shoal.requestlog.capture import CaptureBudget
from shoal.requestlog.entry import Lines, LogEntry
from shoal.requestlog.growing import Growing
from shoal.requestlog.logkeys import LogKeys
from shoal.requestlog.store import Folder, LogFile

log = structlog.get_logger()

GATHER_SECONDS: Final = 0.25
"""How long entries gather before the thread handles them. Nothing waits for an entry."""
FLUSH_SECONDS: Final = 0.75
SYNC_SECONDS: Final = 5.0
FRAME_BYTES: Final = 256 << 10
"""A frame is written at once when its lines have this many bytes."""
Reason = Literal["memory", "disk", "full", "key", "error"]
"""Why an entry was dropped. memory: the budget was used up. disk: a disk error. full: LOG_MAX_BYTES. key: no key to
encrypt with. error: a bug."""


@dataclass(slots=True)
class LogStats:
    """Monotonic counters except the last two fields; read by the metrics."""

    entries: int = 0
    bytes: int = 0
    dropped: Counter[Reason] = field(default_factory=lambda: Counter(dict.fromkeys(_REASONS, 0)))
    without_content: int = 0
    """Entries whose content was left out because a rule of the tenant is refused."""
    held: int = 0
    """Bytes of finished and unfinished files in the folder."""
    error: str | None = None
    """Why the last frame was not written."""


_REASONS: Final[tuple[Reason, ...]] = ("memory", "disk", "full", "key", "error")


@dataclass(slots=True)
class _Waiting:
    """One tenant's lines that are not written yet."""

    since: float
    lines: list[bytes] = field(default_factory=list[bytes])
    bytes: int = 0
    held: int = 0


class LogFileWriter:
    """Writes log files. The event loop calls `put`; all else runs in the thread. `gateway` is in the files' names."""

    def __init__(
        self,
        folder: Folder,
        keys: LogKeys,
        budget: CaptureBudget,
        *,
        gateway: str,
        entry_bytes: int,
        rotate_bytes: int,
        rotate_seconds: float,
        max_bytes: int,
    ) -> None:
        self.stats = LogStats()
        self._folder = folder
        self._keys = keys
        self._budget = budget
        self._files = Growing(folder, gateway, rotate_bytes, rotate_seconds)
        self._max_bytes = max_bytes
        self._lines = Lines(entry_bytes)
        self._jobs: deque[LogEntry] = deque()
        self._calls: deque[Callable[[], None] | None] = deque()
        self._wake = threading.Event()
        self._asleep = False
        """The thread sleeps until it is woken."""
        self._waiting: dict[str, _Waiting] = {}
        self._sync_at = 0.0
        self._refused: dict[str, str] = {}
        self._days: dict[str, int] = {}
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread, once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="request-log", daemon=True)
            self._thread.start()

    def put(self, job: LogEntry) -> None:
        """Never blocks and never raises. The job's bytes are given back to the budget when it is written or dropped."""
        self._jobs.append(job)
        # The thread is not woken for each entry: a thread switch per request would contend for the interpreter's lock.
        if self._thread is None:
            self.start()
        elif self._asleep:
            self._wake.set()

    def stop(self, timeout: float) -> None:
        """Writes the earlier entries, syncs and ends. Blocks."""
        if self._thread is not None:
            self._calls.append(None)
            self._wake.set()
            self._thread.join(timeout)

    def close_files(self, tenant: str | None = None) -> "Future[None]":
        """Writes the earlier entries of a tenant (None: of all) and closes its file, which the writer then no longer
        uses."""
        return self._call(lambda: self._close_of(tenant))

    def recount(self) -> "Future[None]":
        """Measures the folder again, after files were removed."""
        return self._call(self._count)

    def is_open(self, file: LogFile) -> bool:
        """Whether a file is still being written. Callable from any thread."""
        return self._files.is_open(file)

    # --- the thread -------------------------------------------------------------------------------------------------

    def _call(self, work: Callable[[], None]) -> "Future[None]":
        future: Future[None] = Future()

        def call() -> None:
            try:
                work()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        self._calls.append(call)
        self._wake.set()
        self.start()
        return future

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            self._count()
        while True:
            self._rest()
            calls = len(self._calls)  # a call runs after the jobs that came before it
            for _ in range(len(self._jobs)):
                self._take(self._jobs.popleft())
            for _ in range(calls):
                call = self._calls.popleft()
                if call is None:
                    self._close_of(None)
                    return
                call()
            self._due()

    def _rest(self) -> None:
        """Sleeps until there is work, and lets entries gather, so that one iteration handles many of them."""
        if self._waiting or self._files or self._jobs:
            self._wake.wait(GATHER_SECONDS)
        else:
            self._asleep = True
            if not self._jobs:
                self._wake.wait()
            self._asleep = False
            if not self._calls:
                time.sleep(GATHER_SECONDS)
        self._wake.clear()

    def _take(self, job: LogEntry) -> None:
        try:
            line, refusal = self._lines.line(job)
        except Exception as error:
            # The error's text may contain parts of the entry.
            log.error("request log: an entry failed", tenant=job.tenant, error=type(error).__name__)
            self._drop("error", 1, job.size)
            return
        if refusal is not None:
            self.stats.without_content += job.taken is not None
        if self._refused.get(job.tenant) != (why := refusal.why if refusal else None):
            if why is None:
                self._refused.pop(job.tenant, None)
            else:
                self._refused[job.tenant] = why
                log.warning(
                    "request log: no content is logged until the rules are corrected", tenant=job.tenant, why=why
                )
        if (waiting := self._waiting.get(job.tenant)) is None:
            waiting = self._waiting[job.tenant] = _Waiting(time.monotonic())
        waiting.lines.append(line)
        waiting.bytes += len(line)
        waiting.held += job.size
        if self._days.get(job.tenant) != job.logging.retention_days:
            self._keep_days(job.tenant, job.logging.retention_days)
        if waiting.bytes >= FRAME_BYTES:
            self._flush(job.tenant)

    def _keep_days(self, tenant: str, days: int) -> None:
        try:
            self._folder.keep_retention(tenant, days)
        except OSError:
            return  # writing the next frame reports the error
        self._days[tenant] = days

    def _due(self) -> None:
        now = time.monotonic()
        for tenant in [t for t, waiting in self._waiting.items() if now - waiting.since >= FLUSH_SECONDS]:
            self._flush(tenant)
        try:
            self._files.rotate()
            if now >= self._sync_at:
                self._sync_at = now + SYNC_SECONDS
                self._files.sync()
        except OSError as error:
            self._fail(error.strerror or type(error).__name__)

    def _flush(self, tenant: str) -> None:
        waiting = self._waiting.pop(tenant, None)
        if waiting is None:
            return
        count = len(waiting.lines)
        self._keys.refresh()
        key = self._keys.current
        if self._keys.encrypts and key is None:
            self._fail(self._keys.error or "no key")
            self._drop("key", count, waiting.held)
            return
        if self._max_bytes and self.stats.held >= self._max_bytes:
            self._fail(f"the request log holds {self.stats.held} bytes, as many as it may")
            self._drop("full", count, waiting.held)
            return
        try:
            size = self._files.append(tenant, key, b"".join(waiting.lines))
        except OSError as error:
            self._fail(error.strerror or type(error).__name__)
            self._drop("disk", count, waiting.held)
            return
        except Exception as error:  # the thread must go on after any error
            self._fail(type(error).__name__)
            self._drop("error", count, waiting.held)
            return
        self.stats.held += size
        self.stats.bytes += size
        self.stats.entries += count
        if self.stats.error is not None:
            log.info("request log: written again")
            self.stats.error = None
        self._budget.give(waiting.held)

    def _close_of(self, tenant: str | None) -> None:
        for name in list(self._waiting) if tenant is None else [tenant]:
            self._flush(name)
        try:
            self._files.close(tenant)
        except OSError as error:
            self._fail(error.strerror or type(error).__name__)

    def _count(self) -> None:
        self._days.clear()  # the retention files may be gone too
        self.stats.held = self._folder.size()

    def _fail(self, why: str) -> None:
        if why != self.stats.error:
            log.error("request log: entries are dropped", reason=why)
        self.stats.error = why

    def _drop(self, reason: Reason, count: int, held: int) -> None:
        self.stats.dropped[reason] += count
        self._budget.give(held)
