"""Big request bodies, one at a time: decoding one keeps the event loop from everything else, and holds many times its
bytes for as long.

A thread would not help: the decoder keeps the interpreter's lock. So the loop is left alone after each of them for as
long as it took, and tenants take turns.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

from shoal.core.hold.fair import FairQueue

BIG: Final = 256 * 1024
"""Bytes. Smaller ones take a few milliseconds at most."""
SHARE: Final = 0.5
"""Of the loop's time, at most."""


class BigBodies:
    def __init__(self) -> None:
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()
        self._busy = False

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def turn(self, tenant: str, size: int) -> AsyncGenerator[None]:
        """Waits for the turn of a tenant's body, and has it inside the block, in which nothing is awaited."""
        loop = asyncio.get_running_loop()
        if self._busy:
            mine: asyncio.Future[None] = loop.create_future()
            self._waiting.push(tenant, mine, size)
            try:
                await mine
            except asyncio.CancelledError:
                if not self._waiting.remove(tenant, mine) and not mine.cancelled():
                    self._next()
                raise
        self._busy = True
        began = loop.time()
        try:
            yield
        finally:
            loop.call_later((loop.time() - began) * (1 / SHARE - 1), self._next)

    def _next(self) -> None:
        while (waiting := self._waiting.pop()) is not None:
            if not waiting.done():
                waiting.set_result(None)
                return
        self._busy = False
