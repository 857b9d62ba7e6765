"""Base of every wait of a request: it ends with a decision, with the client's departure, or after a time."""

import asyncio
import time

from shoal.gateway.upstream import AbortHandle, UpstreamError


class ClientGone(Exception):
    """The client left."""


class Waiter:
    """Subclasses define when the wait is decided (`decided`), and how its place is freed (`_give_up`)."""

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
        """Whether the wait is over."""
        raise NotImplementedError

    def _give_up(self) -> None:
        """Frees its place."""
        raise NotImplementedError

    def abort(self, error: UpstreamError) -> None:
        """The client left: its place is freed at once."""
        self._gone = True
        self._give_up()
        self._end()

    def close(self) -> None:
        """Ends the wait, whatever the reason."""
        if self.handle is not None:
            self.handle.drop()
            self.handle = None
        self._give_up()

    async def _until(self, seconds: float) -> None:
        """Returns when it is decided, or after `seconds`.

        Raises:
            ClientGone: the client left.
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
