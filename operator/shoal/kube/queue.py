"""A work queue of keys: each key waits at most once, runs at most once at a time, and backs off by itself."""

import asyncio
import contextlib
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

import prometheus_client
import structlog

log = structlog.get_logger()

DEPTH = prometheus_client.Gauge("shoal_queue_depth", "Objects that wait for a reconciliation.", ["queue"])
RECONCILES = prometheus_client.Counter(
    "shoal_reconciles", "Reconciliations by outcome: done, again (to be repeated later), error.", ["queue", "outcome"]
)
RECONCILE_SECONDS = prometheus_client.Histogram(
    "shoal_reconcile_seconds", "Duration of one reconciliation.", ["queue"], buckets=(0.005, 0.02, 0.1, 0.5, 2, 10, 60)
)

Handler = Callable[[str], Awaitable[float | None]]
"""Reconciles a key; returns seconds after which it wants to be called again, or None."""

Finished = Callable[[str, str, float, str | None], None]
"""Called after a reconcile: its queue and key, when it began (time.monotonic), the class of the exception."""

FIRST_BACKOFF: Final = 0.5
LONGEST_BACKOFF: Final = 120.0
ROUND_SECONDS: Final = 0.002
"""Seconds for which reconciles may begin in one round of the event loop. Many that need no I/O would otherwise all run
in one round, and a wake would wait for all of them."""
BEHIND_SECONDS: Final = 0.25
"""For the queue that goes first; then a reconcile begins beside it."""


class TokenBucket:
    """A token bucket over the monotonic clock: `rate` per second, `burst` at once."""

    def __init__(self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic):
        self._rate, self._burst, self._clock = rate, burst, clock
        self._tokens, self._at = float(burst), clock()

    def take(self) -> float:
        """Takes a token; returns the seconds to wait until it is there."""
        now = self._clock()
        self._tokens = min(float(self._burst), self._tokens + (now - self._at) * self._rate)
        self._at = now
        self._tokens -= 1
        return max(0.0, -self._tokens / self._rate)


class WorkQueue:
    """Feed it from callbacks with `add`; `run` works it off until cancelled."""

    def __init__(
        self,
        name: str,
        *,
        workers: int = 4,
        bucket: TokenBucket | None = None,
        behind: "WorkQueue | None" = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`behind`: a queue that goes first. While it has work, nothing begins here, but for at most `BEHIND_SECONDS`
        each time."""
        self.name = name
        self._behind, self._clock = behind, clock
        self.finished: list[Finished] = []
        self._workers = workers
        self._bucket = bucket or TokenBucket(rate=200, burst=1000)
        self._first: deque[str] = deque()
        self._waiting: deque[str] = deque()
        """Both may name keys that were taken from the other meanwhile."""
        self._dirty: set[str] = set()
        self._hurried: set[str] = set()
        """Of the dirty ones: those that go first."""
        self._running: dict[str, float] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._failures: dict[str, int] = {}
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        """Nothing waits, and nothing runs."""
        self._round: float | None = None
        """When the first reconcile of this round of the loop began."""

    def add(self, key: str, *, first: bool = False) -> None:
        """Wants the key reconciled soon; `first`: before all that were not added so. A key that runs now runs once more
        afterwards."""
        if key in self._dirty and (not first or key in self._hurried):
            return
        self._dirty.add(key)
        if first:
            self._hurried.add(key)
        self._idle.clear()
        if key not in self._running:
            self._line_up(key)
        DEPTH.labels(self.name).set(len(self._dirty))

    def _line_up(self, key: str) -> None:
        (self._first if key in self._hurried else self._waiting).append(key)
        self._wake.set()

    def _next(self) -> str | None:
        while self._first or self._waiting:
            key = (self._first or self._waiting).popleft()
            if key in self._dirty and key not in self._running:
                self._dirty.discard(key)
                self._hurried.discard(key)
                return key
        return None

    def add_after(self, key: str, seconds: float) -> None:
        """Wants the key reconciled after this time; of several times the earliest counts."""
        loop = asyncio.get_running_loop()
        known = self._timers.get(key)
        if known is not None:
            if known.when() <= loop.time() + seconds:
                return
            known.cancel()
        self._timers[key] = loop.call_later(seconds, self._due, key)

    def _due(self, key: str) -> None:
        self._timers.pop(key, None)
        self.add(key)

    def idle(self) -> bool:
        """Nothing waits and nothing runs; what is due later does not count."""
        return not self._dirty and not self._running

    async def until_idle(self) -> None:
        """Returns when the queue is idle."""
        await self._idle.wait()

    def longest_running(self) -> float:
        """Seconds since the oldest reconcile that still runs began; 0 when none does."""
        return time.monotonic() - min(self._running.values()) if self._running else 0.0

    async def run(self, handle: Handler) -> None:
        """Works until cancelled. Whatever waits is kept for the next run: leadership may come back."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._workers):
                    group.create_task(self._work(handle))
        finally:
            for timer in self._timers.values():
                timer.cancel()
            self._timers.clear()

    async def _work(self, handle: Handler) -> None:
        while True:
            while (key := self._next()) is None:
                self._wake.clear()
                await self._wake.wait()
            self._running[key] = time.monotonic()
            try:
                if (seconds := self._bucket.take()) > 0:
                    await asyncio.sleep(seconds)
                await self._may_begin()
                await self._once(handle, key)
            except asyncio.CancelledError:
                self._dirty.add(key)  # not done: the next run begins with it
                raise
            finally:
                del self._running[key]
                if key in self._dirty:
                    self._line_up(key)
                elif self.idle():
                    self._idle.set()
                DEPTH.labels(self.name).set(len(self._dirty))

    async def _may_begin(self) -> None:
        """Returns when a reconcile may begin."""
        if self._behind is not None and not self._behind.idle():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEHIND_SECONDS):
                    await self._behind.until_idle()
        while self._round is not None and self._clock() - self._round > ROUND_SECONDS:  # noqa: ASYNC110 - no event tells it
            await asyncio.sleep(0)  # the next round is what is waited for
        if self._round is None:
            self._round = self._clock()
            asyncio.get_running_loop().call_soon(self._new_round)

    def _new_round(self) -> None:
        self._round = None

    async def _once(self, handle: Handler, key: str) -> None:
        begin = time.monotonic()
        failure: str | None = None
        try:
            again = await handle(key)
        except Exception as error:
            failure = type(error).__name__
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            delay = min(LONGEST_BACKOFF, FIRST_BACKOFF * 2 ** min(failures - 1, 10)) * random.uniform(0.5, 1.0)  # noqa: S311
            log.warning(
                "reconcile failed",
                queue=self.name,
                key=key,
                error=str(error) or type(error).__name__,
                failures=failures,
                again_in=round(delay, 1),
                exc_info=failures == 3,
            )
            RECONCILES.labels(self.name, "error").inc()
            self.add_after(key, delay)
        else:
            self._failures.pop(key, None)
            RECONCILES.labels(self.name, "done" if again is None else "again").inc()
            if again is not None:
                self.add_after(key, max(0.05, again))
        finally:
            RECONCILE_SECONDS.labels(self.name).observe(time.monotonic() - begin)
            for listener in self.finished:
                listener(self.name, key, begin, failure)
