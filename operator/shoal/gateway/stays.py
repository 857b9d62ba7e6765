"""Requests that wait for an adapter at replicas that are there: no queue, for who waits for one adapter goes with it.

They count against the Model's bounds together with those that wait in its room (`hold.py`), and in the demand stream.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

from shoal.core.hold.limits import Bound, Held, over
from shoal.core.resolve import ServedModel
from shoal.gateway.stay import Stay

if TYPE_CHECKING:
    from shoal.gateway.hold import Holds

_NOTHING = Held()
K = TypeVar("K")


class Stays:
    """All of this gateway."""

    def __init__(self, holds: "Holds") -> None:
        self._holds = holds
        self._stays: dict[Stay, None] = {}
        self._held: dict[str, Held] = {}
        """By uid of the Model."""
        self._tenants: dict[tuple[str, str], Held] = {}

    def enter(
        self,
        model: ServedModel,
        tenant: str,
        size: int,
        tokens: int,
        *,
        adapter: str,
        at: str | None,
        still: Callable[[], bool],
    ) -> Stay | Bound:
        """A place for one request, or the bound that keeps it out; close it in any case. `adapter` is its uid, `at`
        the pod (by uid) that was asked for it; None: it waits for any."""
        room = self._holds.rooms.get(model.uid)
        held, tenants = self.held(model.uid), self.of_tenant(model.uid, tenant)
        if room is not None:
            held, tenants = sum_of(held, room.held), sum_of(tenants, room.of_tenant(tenant))
        # A Model whose requests may not wait for replicas still has its adapters loaded.
        bound = over(model.limits, size, held, tenants) if model.limits.max_requests else None
        if bound is not None:
            return bound
        stay = Stay(self, model.uid, tenant, size, tokens, adapter=adapter, at=at, still=still)
        self._stays[stay] = None
        self._count(stay, +1)
        self._holds.book.held(model.uid, tokens, stay.since)
        return stay

    def unstay(self, stay: Stay) -> None:
        """It waits no longer; saying so again changes nothing."""
        if stay in self._stays:
            del self._stays[stay]
            self._count(stay, -1)
            self._holds.book.unheld(stay.model_uid, stay.tokens, stay.since)

    def held(self, uid: str) -> Held:
        """What waits of a Model."""
        return self._held.get(uid, _NOTHING)

    def of_tenant(self, uid: str, tenant: str) -> Held:
        return self._tenants.get((uid, tenant), _NOTHING)

    @property
    def waiting(self) -> int:
        return len(self._stays)

    def look(self) -> None:
        """The cluster changed: wakes those that may not go on as they are."""
        for stay in list(self._stays):
            if not stay.still():
                stay.wake()

    def heard(self, model_uid: str, pod: str) -> None:
        """The agent of a pod said something: wakes those of the Model that wait for any replica, if there is one now,
        and those that wait for a slot at another one, as many as there are slots here."""
        waiting = [stay for stay in self._stays if stay.model_uid == model_uid]
        if not waiting:
            return
        if any(stay.at is None for stay in waiting):
            snapshot = self._holds.directory.snapshot
            model = next((m for m in snapshot.models.values() if m.uid == model_uid), None)
            if model is None or self._holds.fleet.serves_adapters(snapshot, model):
                for stay in waiting:
                    if stay.at is None:
                        stay.wake()
        self._move(waiting, pod)

    def _move(self, waiting: Iterable[Stay], pod: str) -> None:
        """To a slot that came free, whoever has waited longest; all who wait for one adapter go with it."""
        free = self._holds.fleet.free_slots(pod)
        if not free:
            return
        moved: set[str] = set()
        for stay in waiting:
            if stay.at is None or stay.at == pod or self._holds.fleet.free_slots(stay.at) != 0:
                continue
            if stay.adapter in moved or len(moved) < free:
                moved.add(stay.adapter)
                stay.wake()

    def _count(self, stay: Stay, sign: int) -> None:
        size = sign * stay.size
        _add(self._held, stay.model_uid, sign, size)
        _add(self._tenants, (stay.model_uid, stay.tenant), sign, size)


def sum_of(one: Held, other: Held) -> Held:
    return Held(one.requests + other.requests, one.bytes + other.bytes)


def _add(kept: dict[K, Held], key: K, requests: int, size: int) -> None:
    after = sum_of(kept.get(key, _NOTHING), Held(requests, size))
    if after.requests:
        kept[key] = after
    else:
        kept.pop(key, None)
