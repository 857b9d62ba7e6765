"""A request that waits: in its Model's hold queue (`Ticket`), or for its adapter at running replicas (`AdapterWait`).

A wait ends when the queue decides, when the client leaves, or after a time. The request awaits `wait`.
"""

import asyncio
import time
from collections.abc import Callable, Collection
from typing import Protocol, Self, TypeVar

from shoal.core.routing.replica import Replica
from shoal.core.routing.reuse import Prompt
from shoal.core.routing.score import Pick
from shoal.gateway.upstream import AbortHandle, UpstreamError
from shoal.net.errors import ApiError

W_contra = TypeVar("W_contra", contravariant=True)


def any_replica(_replica: Replica) -> bool:
    """Every replica suits."""
    return True


class ClientGone(Exception):
    """The client left."""


class WaitQueue(Protocol[W_contra]):
    """The queue that counts a waiter."""

    @property
    def retry_after(self) -> int:
        """Seconds after which a client that waited in vain should try again."""
        ...

    @property
    def expected_seconds(self) -> float | None:
        """Seconds until a replica comes; None: unknown."""
        ...

    @property
    def starts(self) -> bool:
        """The Model has no replica, and one may come."""
        ...

    def leave(self, waiter: W_contra, /) -> None:
        """Frees the waiter's place. A second call changes nothing."""
        ...


class Waiter:
    """One wait of one request. `reason` is the NoReplica reason that made it wait."""

    __slots__ = (
        "_future",
        "_gone",
        "_queue",
        "_refusal",
        "decided",
        "handle",
        "reason",
        "since",
        "size",
        "tenant",
        "tokens",
    )

    def __init__(self, queue: WaitQueue[Self], reason: str, tenant: str, size: int, tokens: int) -> None:
        self.reason = reason
        self.tenant = tenant
        self.size = size
        self.tokens = tokens
        self.since = time.monotonic()
        self.handle: AbortHandle | None = None
        self.decided = False
        """Whether the wait is over: the request may continue, or it was refused."""
        self._queue: WaitQueue[Self] = queue
        self._refusal: ApiError | None = None
        self._future: asyncio.Future[None] | None = None
        self._gone = False

    @property
    def retry_after(self) -> int:
        """Seconds after which the client should try again."""
        return self._queue.retry_after

    @property
    def expected_seconds(self) -> float | None:
        """Seconds until a replica comes; None: unknown."""
        return self._queue.expected_seconds

    @property
    def starts(self) -> bool:
        """The request waits for a replica that starts, and not for one that is busy."""
        return self._queue.starts

    async def wait(self, seconds: float) -> bool:
        """Waits. Returns True when the request may continue, False after `seconds`.

        Raises:
            ApiError: the request is refused.
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
        if self._refusal is not None:
            raise self._refusal
        return self.decided

    def wake(self) -> None:
        """Ends the wait: the request continues."""
        self.decided = True
        self._end()

    def refuse(self, error: ApiError) -> None:
        """Ends the wait: the client gets the error."""
        self._refusal = error
        self.wake()

    def abort(self, error: UpstreamError) -> None:
        """Called when the client leaves: frees the request's place at once."""
        self._gone = True
        self._queue.leave(self)
        self._end()

    def close(self) -> None:
        """Ends the wait, whatever the reason."""
        if self.handle is not None:
            self.handle.drop()
            self.handle = None
        self._queue.leave(self)

    def _end(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(None)


class Ticket(Waiter):
    """One request in a Model's hold queue. It continues when it is released to a replica."""

    __slots__ = (
        "_taken",
        "among",
        "check",
        "is_retry",
        "model_name",
        "paid",
        "pick",
        "priority",
        "prompt",
        "replica",
        "suits",
        "tried",
    )

    def __init__(
        self,
        queue: "WaitQueue[Ticket]",
        reason: str,
        tenant: str,
        model_name: str,
        size: int,
        tokens: int,
        tried: Collection[str],
        priority: int,
        is_retry: bool,
        prompt: Prompt | None = None,
        suits: Callable[[Replica], bool] = any_replica,
    ) -> None:
        super().__init__(queue, reason, tenant, size, tokens)
        self.model_name = model_name
        self.tried = tried
        self.suits = suits
        """Whether a replica's engine does what the request asks for."""
        self.priority = priority
        self.is_retry = is_retry
        """The request was sent before and failed: its next attempt is a retry, charged to the Model's retry budget."""
        self.paid = False
        self.prompt = prompt
        """What the choice of the replica goes by; None: the request chooses again, or there is no prompt."""
        self.pick: Pick | None = None
        """Why the replica, if it was chosen by its score."""
        self.among = 1
        """Replicas among which it was chosen."""
        self.replica: Replica | None = None
        """The replica that the request was released to. The request counts as in flight there from then on."""
        self.check: Callable[[], None] | None = None
        """Raises ApiError if the client may no longer use the Model."""
        self._taken = False

    def release(self, replica: Replica, pick: Pick | None = None, among: int = 1) -> None:
        self.replica, self.pick, self.among = replica, pick, among
        self.wake()

    def take(self) -> Replica:
        """Claims the replica; from now on the caller must report when the request has left it."""
        if self.replica is None:
            raise ValueError("the ticket was not released")
        self._taken = True
        return self.replica

    @property
    def unclaimed(self) -> Replica | None:
        """The replica that the request was released to, if it was not claimed."""
        return None if self._taken else self.replica

    def close(self) -> None:
        """Ends the wait, whatever the reason."""
        self.check = None
        super().close()


class AdapterWait(Waiter):
    """One request that waits for an adapter: to be loaded, for a slot, or for a replica that serves adapters. When it
    is woken, the request tries again. `may_continue` is checked at every change of the cluster; False wakes the
    request."""

    __slots__ = ("adapter", "at", "may_continue", "model_uid")

    def __init__(
        self,
        queue: "WaitQueue[AdapterWait]",
        reason: str,
        model_uid: str,
        tenant: str,
        size: int,
        tokens: int,
        *,
        adapter: str,
        at: str | None,
        may_continue: Callable[[], bool],
    ) -> None:
        super().__init__(queue, reason, tenant, size, tokens)
        self.model_uid = model_uid
        self.adapter = adapter
        """The adapter's uid."""
        self.at = at
        """Uid of the pod whose agent was asked for a lease; None: the request waits for any replica that serves
        adapters; "": it waits only for time to pass."""
        self.may_continue = may_continue
