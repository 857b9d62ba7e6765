"""Requests that wait for an adapter at running replicas. There is no queue: when an adapter is ready, all its requests
go.

They count against the Model's bounds together with the requests in its hold queue (`hold.py`), and in the demand
stream.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final, Protocol, TypeVar

from shoal.core.hold.limits import Bound, Held, over
from shoal.core.routing.resolve import ServedModel
from shoal.gateway.demand import DemandState
from shoal.gateway.directory import Directory
from shoal.gateway.replicapool import ReplicaPool
from shoal.gateway.waiter import AdapterWait

_RETRY_AFTER: Final = 5
_NOTHING = Held()
K = TypeVar("K")


class HeldCounts(Protocol):
    """The counts of a Model's hold queue."""

    @property
    def held(self) -> Held: ...

    def of_tenant(self, tenant: str) -> Held: ...


class AdapterWaits:
    """All adapter waits of this gateway. `queues` are the hold queues by uid of the Model."""

    def __init__(
        self, queues: Mapping[str, HeldCounts], directory: Directory, fleet: ReplicaPool, demand: DemandState
    ) -> None:
        self._queues = queues
        self._directory = directory
        self._fleet = fleet
        self._demand = demand
        self._waits: dict[AdapterWait, None] = {}
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
        reason: str,
        adapter: str,
        at: str | None,
        may_continue: Callable[[], bool],
    ) -> AdapterWait | Bound:
        """Begins a wait, or returns the bound that forbids it. The caller must close the wait. `reason` is the
        NoReplica reason; `adapter` is the adapter's uid; `at` is the uid of the pod that was asked to load it, None for
        any pod."""
        queue = self._queues.get(model.uid)
        held, tenants = self.held(model.uid), self.of_tenant(model.uid, tenant)
        if queue is not None:
            held, tenants = sum_of(held, queue.held), sum_of(tenants, queue.of_tenant(tenant))
        # A Model whose requests may not wait for replicas still has its adapters loaded.
        bound = over(model.limits, size, held, tenants) if model.limits.max_requests else None
        if bound is not None:
            return bound
        wait = AdapterWait(
            self, reason, model.uid, tenant, size, tokens, adapter=adapter, at=at, may_continue=may_continue
        )
        self._waits[wait] = None
        self._count(wait, +1)
        self._demand.held(model.uid, tokens, wait.since)
        return wait

    def leave(self, wait: AdapterWait) -> None:
        """Ends a wait. A second call changes nothing."""
        if wait in self._waits:
            del self._waits[wait]
            self._count(wait, -1)
            self._demand.released(wait.model_uid, wait.tokens, wait.since)

    def held(self, uid: str) -> Held:
        """A Model's requests that wait for adapters."""
        return self._held.get(uid, _NOTHING)

    def of_tenant(self, uid: str, tenant: str) -> Held:
        return self._tenants.get((uid, tenant), _NOTHING)

    @property
    def waiting(self) -> int:
        return len(self._waits)

    @property
    def retry_after(self) -> int:
        """Seconds after which a client that waited in vain should try again."""
        return _RETRY_AFTER

    @property
    def expected_seconds(self) -> float | None:
        """Unknown: how long an adapter takes to load is not measured here."""
        return None

    @property
    def starts(self) -> bool:
        """Replicas are there."""
        return False

    def cluster_changed(self) -> None:
        """Wakes the waits that may not continue after a change of the cluster."""
        for wait in list(self._waits):
            if not wait.may_continue():
                wait.wake()

    def agent_reported(self, model_uid: str, pod: str) -> None:
        """A pod's agent reported. Wakes the Model's requests that wait for any replica, if one serves adapters now, and
        as many of those that wait for a slot elsewhere as this pod has free slots."""
        waiting = [wait for wait in self._waits if wait.model_uid == model_uid]
        if not waiting:
            return
        if any(wait.at is None for wait in waiting):
            snapshot = self._directory.snapshot
            model = next((m for m in snapshot.models.values() if m.uid == model_uid), None)
            if model is None or self._fleet.serves_adapters(snapshot, model):
                for wait in waiting:
                    if wait.at is None:
                        wait.wake()
        self._wake_for_free_slots(waiting, pod)

    def _wake_for_free_slots(self, waiting: Iterable[AdapterWait], pod: str) -> None:
        """Offers free slots to the adapters that have waited longest. All requests for one adapter are woken
        together."""
        free = self._fleet.free_slots(pod)
        if not free:
            return
        moved: set[str] = set()
        for wait in waiting:
            if wait.at is None or wait.at == pod or self._fleet.free_slots(wait.at) != 0:
                continue
            if wait.adapter in moved or len(moved) < free:
                moved.add(wait.adapter)
                wait.wake()

    def _count(self, wait: AdapterWait, sign: int) -> None:
        size = sign * wait.size
        _add(self._held, wait.model_uid, sign, size)
        _add(self._tenants, (wait.model_uid, wait.tenant), sign, size)


def sum_of(one: Held, other: Held) -> Held:
    return Held(one.requests + other.requests, one.bytes + other.bytes)


def _add(kept: dict[K, Held], key: K, requests: int, size: int) -> None:
    after = sum_of(kept.get(key, _NOTHING), Held(requests, size))
    if after.requests:
        kept[key] = after
    else:
        kept.pop(key, None)
