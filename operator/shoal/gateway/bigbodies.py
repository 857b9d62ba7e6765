"""Large request bodies are decoded one at a time: decoding blocks the event loop and needs many times the body's bytes.

A thread would not help, because the decoder keeps the interpreter's lock. After each large body the event loop is left
free for as long as the decoding took. Tenants are served in fair order.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

from shoal.core.hold.fair import FairQueue

BIG: Final = 256 * 1024
"""Bytes. Smaller bodies take a few milliseconds at most."""
SHARE: Final = 0.5
"""Largest share of the event loop's time spent on large bodies."""


class BigBodies:
    def __init__(self) -> None:
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()
        self._busy = False

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def slot(self, tenant: str, size: int) -> AsyncGenerator[None]:
        """Waits for the decoding slot and holds it inside the block. The block must not await."""
        loop = asyncio.get_running_loop()
        if self._busy:
            slot: asyncio.Future[None] = loop.create_future()
            self._waiting.push(tenant, slot, size)
            try:
                await slot
            except asyncio.CancelledError:
                if not self._waiting.remove(tenant, slot) and not slot.cancelled():
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
