"""Runs the scheduler against a clock: every step lasts as long as on the simulated GPU, divided by the speed."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from shoal_dev.sim.scheduler import Scheduler

_SLEEP_FROM: Final = 0.001
"""Seconds. Shorter waits are gathered, since the event loop cannot sleep that exactly: the tokens of several steps
then come out together, as they do from a real engine that is faster than its front end."""
_LAG: Final = 0.25
"""Seconds that a slow machine may catch up."""


class Clock(Protocol):
    """Time, so that tests need not wait."""

    def now(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class RealClock:
    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class EngineLoop:
    """One engine's forward loop."""

    def __init__(
        self,
        scheduler: Scheduler,
        clock: Clock,
        *,
        speed: float = 1.0,
        slowdown: Callable[[], float] = lambda: 1.0,
    ) -> None:
        """`slowdown`: by which a step takes longer than it should."""
        self._slowdown = slowdown
        self._scheduler = scheduler
        self._clock = clock
        self._speed = speed
        self._wake = asyncio.Event()
        self._running = asyncio.Event()
        self._running.set()
        self._interrupts: deque[tuple[Callable[[], Awaitable[float]], asyncio.Future[None]]] = deque()
        self._interrupted = False
        self._recent: deque[tuple[float, int]] = deque([(clock.now(), 0)], maxlen=2)

    def wake(self) -> None:
        """Call after anything was submitted or resumed."""
        self._wake.set()

    @property
    def stalled(self) -> bool:
        return not self._running.is_set()

    @property
    def halted(self) -> bool:
        """Whether the loop does something else than to compute, or nothing: it publishes no load then."""
        return self.stalled or self._interrupted

    def stall(self) -> None:
        """A hung GPU: no step ends any more."""
        self._running.clear()

    def recover(self) -> None:
        self._running.set()

    async def recovered(self) -> None:
        """Returns when the loop is not stalled."""
        await self._running.wait()

    async def interrupt(self, work: Callable[[], Awaitable[float]]) -> None:
        """Runs `work` between two steps: nothing is computed until it has ended and until the seconds that it returns
        have passed since its begin. Raises what `work` raises."""
        done = asyncio.get_running_loop().create_future()
        self._interrupts.append((work, done))
        self._wake.set()
        await done

    async def step(self) -> None:
        """Returns when the loop has come to the end of what it does."""

        async def nothing() -> float:
            return 0.0

        await self.interrupt(nothing)

    async def alive(self, timeout: float) -> bool:
        """Whether the loop turns within `timeout` seconds: what /health wants to know."""
        try:
            async with asyncio.timeout(timeout):
                await self._running.wait()
        except TimeoutError:
            return False
        return True

    def throughput(self) -> float:
        """Generated tokens per second since the last call but one."""
        now, tokens = self._clock.now(), self._scheduler.totals.decode_tokens
        if now - self._recent[-1][0] >= 1.0:
            self._recent.append((now, tokens))
        since, before = self._recent[0]
        return round((tokens - before) / (now - since), 2) if now > since else 0.0

    async def run(self) -> None:
        """Until cancelled."""
        due = yielded = self._clock.now()
        while True:
            await self._running.wait()
            if self._interrupts:
                due = yielded = await self._interrupt()
                continue
            duration = self._scheduler.begin(self._clock.now())
            if duration is None:
                self._wake.clear()
                await self._wake.wait()
                due = max(due, self._clock.now())
                continue
            due = max(due + duration * self._slowdown() / self._speed, self._clock.now() - _LAG)
            wait = due - self._clock.now()
            if wait >= _SLEEP_FROM:
                await self._clock.sleep(wait)
                yielded = self._clock.now()
            elif self._clock.now() - yielded >= _SLEEP_FROM:
                await asyncio.sleep(0)
                yielded = self._clock.now()
            if self.stalled:
                await self._running.wait()
            self._scheduler.complete(self._clock.now())

    async def _interrupt(self) -> float:
        """Serves one interruption; when it ended."""
        work, done = self._interrupts.popleft()
        begun = self._clock.now()
        self._interrupted = True
        try:
            until = begun + await work() / self._speed
            if until > self._clock.now():
                await self._clock.sleep(until - self._clock.now())
        except Exception as error:
            if not done.done():
                done.set_exception(error)
        else:
            if not done.done():
                done.set_result(None)
        finally:
            self._interrupted = False
        return self._clock.now()
