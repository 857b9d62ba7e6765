"""One request that waits for an adapter: for its load, for a slot, or for a replica that serves adapters."""

from collections.abc import Callable
from typing import Final, Protocol

from shoal.gateway.waiter import Waiter

_RETRY_AFTER: Final = 5


class Place(Protocol):
    """Where it counts as waiting."""

    def unstay(self, stay: "Stay") -> None: ...


class Stay(Waiter):
    """Waits until it is woken, to look again. `still` says, at every change of the cluster, whether it may go on."""

    __slots__ = ("_place", "_woken", "adapter", "at", "model_uid", "still")

    def __init__(
        self,
        place: Place,
        model_uid: str,
        tenant: str,
        size: int,
        tokens: int,
        *,
        adapter: str,
        at: str | None,
        still: Callable[[], bool],
    ) -> None:
        super().__init__(tenant, size, tokens)
        self.model_uid = model_uid
        self.adapter = adapter
        """Its uid."""
        self.at = at
        """Uid of the pod whose agent was asked; None: it waits for any replica that serves adapters, or for time."""
        self.still = still
        self._place = place
        self._woken = False

    @property
    def decided(self) -> bool:
        return self._woken

    @property
    def retry_after(self) -> int:
        """Seconds after which another try makes sense."""
        return _RETRY_AFTER

    async def wait(self, seconds: float) -> bool:
        """Whether it was woken; False after `seconds`.

        Raises:
            ClientGone: its client left.
        """
        await self._until(seconds)
        return self._woken

    def wake(self) -> None:
        """There is something new."""
        self._woken = True
        self._end()

    def _give_up(self) -> None:
        self._place.unstay(self)
