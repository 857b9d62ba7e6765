"""One request that waits for a replica: what it is told, and what it tells."""

import asyncio
import time
from collections.abc import Callable, Collection
from typing import Protocol

from shoal.core.routing import Replica
from shoal.gateway.errors import ApiError
from shoal.gateway.upstream import AbortHandle, UpstreamError


class ClientGone(Exception):
    """The client left."""


class Room(Protocol):
    """Where it waits."""

    @property
    def retry_after(self) -> int:
        """Seconds after which another try makes sense."""
        ...

    def leave(self, ticket: "Ticket") -> None:
        """Takes a ticket out, if it is still there; ends a release that nobody took."""
        ...


class Ticket:
    """One request that waits."""

    __slots__ = (
        "_future",
        "_gone",
        "_refusal",
        "_room",
        "_taken",
        "again",
        "check",
        "handle",
        "paid",
        "priority",
        "replica",
        "since",
        "size",
        "tenant",
        "tokens",
        "tried",
        "word",
    )

    def __init__(
        self,
        room: Room,
        tenant: str,
        word: str,
        size: int,
        tokens: int,
        tried: Collection[str],
        priority: int,
        again: bool,
    ) -> None:
        self.tenant = tenant
        self.word = word
        self.size = size
        self.tokens = tokens
        self.tried = tried
        self.priority = priority
        self.again = again
        """It was sent before, in vain: another time is a retry, which the Model's budget has to pay."""
        self.paid = False
        self.since = time.monotonic()
        self.replica: Replica | None = None
        """Where it may go; it counts as in flight there from that moment."""
        self.handle: AbortHandle | None = None
        self.check: Callable[[], None] | None = None
        """Raises ApiError when the client may not ask any more."""
        self._room = room
        self._future: asyncio.Future[None] | None = None
        self._refusal: ApiError | None = None
        self._gone = False
        self._taken = False

    async def wait(self, seconds: float) -> bool:
        """Whether it may go to `replica`; False after `seconds`.

        Raises:
            ApiError: it is refused.
            ClientGone: its client left.
        """
        if not self._decided:
            loop = asyncio.get_running_loop()
            self._future = loop.create_future()
            timer = loop.call_later(seconds, self._wake)
            try:
                await self._future
            finally:
                timer.cancel()
                self._future = None
        if self._gone:
            raise ClientGone
        if self._refusal is not None:
            raise self._refusal
        return self.replica is not None

    def take(self) -> Replica:
        """The replica; from now on it is the caller's to say when the request has left it."""
        if self.replica is None:
            raise ValueError("it was not released")
        self._taken = True
        return self.replica

    @property
    def retry_after(self) -> int:
        """Seconds after which another try makes sense."""
        return self._room.retry_after

    def release(self, replica: Replica) -> None:
        self.replica = replica
        self._wake()

    def refuse(self, error: ApiError) -> None:
        self._refusal = error
        self._wake()

    def abort(self, error: UpstreamError) -> None:
        """The client left: its place is free at once."""
        self._gone = True
        self._room.leave(self)
        self._wake()

    def close(self) -> None:
        """The request waits no longer, whatever the reason."""
        if self.handle is not None:
            self.handle.drop()
            self.handle = None
        self.check = None
        self._room.leave(self)

    @property
    def forgone(self) -> Replica | None:
        """A replica that it was let go to, and nobody took."""
        return None if self._taken else self.replica

    @property
    def _decided(self) -> bool:
        return self._gone or self._refusal is not None or self.replica is not None

    def _wake(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(None)
