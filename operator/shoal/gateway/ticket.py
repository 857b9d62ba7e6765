"""One request in a hold queue, and the outcome of its wait."""

from collections.abc import Callable, Collection
from typing import Protocol

from shoal.core.routing.choice import Replica
from shoal.gateway.waiter import Waiter
from shoal.net.errors import ApiError


class TicketQueue(Protocol):
    """The queue of a ticket."""

    @property
    def retry_after(self) -> int:
        """Seconds after which the client should try again."""
        ...

    def leave(self, ticket: "Ticket") -> None:
        """Removes a ticket if it is still queued, or undoes a release that was not claimed."""
        ...


class Ticket(Waiter):
    """One held request."""

    __slots__ = (
        "_queue",
        "_refusal",
        "_taken",
        "check",
        "is_retry",
        "model_name",
        "paid",
        "priority",
        "replica",
        "tried",
    )

    def __init__(
        self,
        queue: TicketQueue,
        tenant: str,
        model_name: str,
        size: int,
        tokens: int,
        tried: Collection[str],
        priority: int,
        again: bool,
    ) -> None:
        super().__init__(tenant, size, tokens)
        self.model_name = model_name
        self.tried = tried
        self.priority = priority
        self.is_retry = again
        """The request was sent before and failed: its next attempt is a retry, charged to the Model's retry budget."""
        self.paid = False
        self.replica: Replica | None = None
        """The replica that it was released to, where it counts as in flight from then on."""
        self.check: Callable[[], None] | None = None
        """Raises ApiError if the client is no longer allowed."""
        self._queue = queue
        self._refusal: ApiError | None = None
        self._taken = False

    async def wait(self, seconds: float) -> bool:
        """True when released to `replica`; False after `seconds`.

        Raises:
            ApiError: the request is refused.
            ClientGone: the client left.
        """
        await self._until(seconds)
        if self._refusal is not None:
            raise self._refusal
        return self.replica is not None

    def take(self) -> Replica:
        """Claims the replica; from now on the caller must report when the request has left it."""
        if self.replica is None:
            raise ValueError("the ticket was not released")
        self._taken = True
        return self.replica

    @property
    def retry_after(self) -> int:
        """Seconds after which the client should try again."""
        return self._queue.retry_after

    def release(self, replica: Replica) -> None:
        self.replica = replica
        self._end()

    def refuse(self, error: ApiError) -> None:
        self._refusal = error
        self._end()

    def close(self) -> None:
        """Ends the wait, whatever the reason."""
        self.check = None
        super().close()

    @property
    def unclaimed(self) -> Replica | None:
        """A replica that it was released to and that was not claimed."""
        return None if self._taken else self.replica

    @property
    def decided(self) -> bool:
        return self._refusal is not None or self.replica is not None

    def _give_up(self) -> None:
        self._queue.leave(self)
