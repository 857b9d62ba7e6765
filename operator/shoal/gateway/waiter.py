"""What every request that waits has in common: it waits until something is decided, until its client leaves, or for so
long."""

import asyncio
import time

from shoal.gateway.upstream import AbortHandle, UpstreamError


class ClientGone(Exception):
    """The client left."""


class Waiter:
    """Subclasses say what is decided (`decided`), and what becomes of the place (`_give_up`)."""

    __slots__ = ("_future", "_gone", "handle", "since", "size", "tenant", "tokens")

    def __init__(self, tenant: str, size: int, tokens: int) -> None:
        self.tenant = tenant
        self.size = size
        self.tokens = tokens
        self.since = time.monotonic()
        self.handle: AbortHandle | None = None
        self._future: asyncio.Future[None] | None = None
        self._gone = False

    @property
    def decided(self) -> bool:
        """There is no use in waiting any longer."""
        raise NotImplementedError

    def _give_up(self) -> None:
        """Its place is free."""
        raise NotImplementedError

    def abort(self, error: UpstreamError) -> None:
        """The client left: its place is free at once."""
        self._gone = True
        self._give_up()
        self._end()

    def close(self) -> None:
        """The request waits here no longer, whatever the reason."""
        if self.handle is not None:
            self.handle.drop()
            self.handle = None
        self._give_up()

    async def _until(self, seconds: float) -> None:
        """Returns when it is decided, or after so long.

        Raises:
            ClientGone: its client left.
        """
        if not self._gone and not self.decided:
            loop = asyncio.get_running_loop()
            self._future = loop.create_future()
            timer = loop.call_later(seconds, self._end)
            try:
                await self._future
            finally:
                timer.cancel()
                self._future = None
        if self._gone:
            raise ClientGone

    def _end(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(None)
