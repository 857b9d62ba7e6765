"""So many at a time, first come, first served; what takes long leaves its turn to the next one and goes on."""

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator


class FetchSlots:
    """`count` at a time; one that takes longer than `seconds` does not count any more."""

    def __init__(self, count: int, seconds: float = math.inf) -> None:
        self._free = asyncio.Semaphore(count)
        self._seconds = seconds

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncGenerator[None]:
        """Waits for a turn, and has it inside."""
        await self._free.acquire()
        passed = False

        def pass_on() -> None:
            nonlocal passed
            if not passed:
                passed = True
                self._free.release()

        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._seconds, pass_on) if math.isfinite(self._seconds) else None
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
            pass_on()
