"""One request that waits for a replica: what it is told, and what it tells."""

from collections.abc import Callable, Collection
from typing import Protocol

from shoal.core.routing import Replica
from shoal.gateway.errors import ApiError
from shoal.gateway.waiter import Waiter


class Room(Protocol):
    """Where it waits."""

    @property
    def retry_after(self) -> int:
        """Seconds after which another try makes sense."""
        ...

    def leave(self, ticket: "Ticket") -> None:
        """Takes a ticket out, if it is still there; ends a release that nobody took."""
        ...


class Ticket(Waiter):
    """One request that waits."""

    __slots__ = ("_refusal", "_room", "_taken", "again", "check", "paid", "priority", "replica", "tried", "word")

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
        super().__init__(tenant, size, tokens)
        self.word = word
        self.tried = tried
        self.priority = priority
        self.again = again
        """It was sent before, in vain: another time is a retry, which the Model's budget has to pay."""
        self.paid = False
        self.replica: Replica | None = None
        """Where it may go; it counts as in flight there from that moment."""
        self.check: Callable[[], None] | None = None
        """Raises ApiError when the client may not ask any more."""
        self._room = room
        self._refusal: ApiError | None = None
        self._taken = False

    async def wait(self, seconds: float) -> bool:
        """Whether it may go to `replica`; False after `seconds`.

        Raises:
            ApiError: it is refused.
            ClientGone: its client left.
        """
        await self._until(seconds)
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
        self._end()

    def refuse(self, error: ApiError) -> None:
        self._refusal = error
        self._end()

    def close(self) -> None:
        """The request waits no longer, whatever the reason."""
        self.check = None
        super().close()

    @property
    def forgone(self) -> Replica | None:
        """A replica that it was let go to, and nobody took."""
        return None if self._taken else self.replica

    @property
    def decided(self) -> bool:
        return self._refusal is not None or self.replica is not None

    def _give_up(self) -> None:
        self._room.leave(self)
