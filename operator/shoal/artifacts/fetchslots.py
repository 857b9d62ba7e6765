"""A semaphore for fetches, first come, first served. A slow fetch gives up its slot and continues."""

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator


class FetchSlots:
    """`count` slots; a fetch that takes longer than `seconds` no longer occupies one."""

    def __init__(self, count: int, seconds: float = math.inf) -> None:
        self._free = asyncio.Semaphore(count)
        self._seconds = seconds

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncGenerator[None]:
        """Waits for a slot and holds it in the body."""
        await self._free.acquire()
        given_up = False

        def give_up() -> None:
            nonlocal given_up
            if not given_up:
                given_up = True
                self._free.release()

        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._seconds, give_up) if math.isfinite(self._seconds) else None
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
            give_up()
