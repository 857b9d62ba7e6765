"""One request that waits for an adapter: for its load, for a slot, or for a replica that serves adapters."""

import asyncio
import time
from collections.abc import Callable
from typing import Final, Protocol

from shoal.gateway.ticket import ClientGone
from shoal.gateway.upstream import AbortHandle, UpstreamError

_RETRY_AFTER: Final = 5


class Place(Protocol):
    """Where it counts as waiting."""

    def unstay(self, stay: "Stay") -> None: ...


class Stay:
    """Waits until it is woken, to look again. `still` says, at every change of the cluster, whether it may go on."""

    __slots__ = (
        "_future",
        "_gone",
        "_place",
        "_woken",
        "for_replica",
        "handle",
        "model_uid",
        "since",
        "size",
        "still",
        "tenant",
        "tokens",
    )

    def __init__(
        self,
        place: Place,
        model_uid: str,
        tenant: str,
        size: int,
        tokens: int,
        *,
        for_replica: bool,
        still: Callable[[], bool],
    ) -> None:
        self.since = time.monotonic()
        self.model_uid = model_uid
        self.tenant = tenant
        self.size = size
        self.tokens = tokens
        self.for_replica = for_replica
        """It waits for any replica that serves adapters."""
        self.still = still
        self.handle: AbortHandle | None = None
        self._place = place
        self._future: asyncio.Future[None] | None = None
        self._gone = self._woken = False

    @property
    def retry_after(self) -> int:
        """Seconds after which another try makes sense."""
        return _RETRY_AFTER

    async def wait(self, seconds: float) -> bool:
        """Whether it was woken; False after `seconds`.

        Raises:
            ClientGone: its client left.
        """
        if not self._gone and not self._woken:
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
        return self._woken

    def wake(self) -> None:
        """There is something new."""
        self._woken = True
        self._end()

    def abort(self, error: UpstreamError) -> None:
        """The client left: its place is free at once."""
        self._gone = True
        self._place.unstay(self)
        self._end()

    def close(self) -> None:
        """The request waits here no longer, whatever the reason."""
        if self.handle is not None:
            self.handle.drop()
            self.handle = None
        self._place.unstay(self)

    def _end(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(None)
