"""One request that waits for an adapter: to be loaded, for a slot, or for a replica that serves adapters."""

from collections.abc import Callable
from typing import Final, Protocol

from shoal.gateway.waiter import Waiter

_RETRY_AFTER: Final = 5


class AdapterWaitQueue(Protocol):
    """Where the request is counted as waiting."""

    def leave(self, wait: "AdapterWait") -> None: ...


class AdapterWait(Waiter):
    """Waits until it is woken and then tries again. `may_continue` is checked at every change of the cluster; False
    wakes the request."""

    __slots__ = ("_queue", "_woken", "adapter", "at", "may_continue", "model_uid")

    def __init__(
        self,
        queue: AdapterWaitQueue,
        model_uid: str,
        tenant: str,
        size: int,
        tokens: int,
        *,
        adapter: str,
        at: str | None,
        may_continue: Callable[[], bool],
    ) -> None:
        super().__init__(tenant, size, tokens)
        self.model_uid = model_uid
        self.adapter = adapter
        """The adapter's uid."""
        self.at = at
        """Uid of the pod whose agent was asked for a lease; None: it waits for any replica that serves adapters; "":
        only for time to pass."""
        self.may_continue = may_continue
        self._queue = queue
        self._woken = False

    @property
    def decided(self) -> bool:
        return self._woken

    @property
    def retry_after(self) -> int:
        """Seconds after which the client should try again."""
        return _RETRY_AFTER

    async def wait(self, seconds: float) -> bool:
        """True when woken; False after `seconds`.

        Raises:
            ClientGone: the client left.
        """
        await self._until(seconds)
        return self._woken

    def wake(self) -> None:
        """Ends the wait, so that the request tries again."""
        self._woken = True
        self._end()

    def _give_up(self) -> None:
        self._queue.leave(self)
