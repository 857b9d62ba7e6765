"""The replicas of a pool while a plan is made: who has which place."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from shoal.core.lora.placement.rendezvous import digest, score
from shoal.core.lora.placement.types import Adapter, Limits, Replica, Why

_SPARE = 8
"""One in so many places of host memory is left to adapters that nobody planned for."""


@dataclass(slots=True)
class PlacedAdapter:
    """An adapter on a floor."""

    why: Why
    cost: float
    next: bool = False
    """Its newer revision stands beside the one that answers."""


@dataclass(slots=True)
class ReplicaSlots:
    """One replica, and what is on its floor so far."""

    replica: Replica
    limits: Limits
    counts: bool
    """What it has counts as a copy; not while it has been away for long."""
    digest: int
    used: int = 0
    """Entries of its floor."""
    pinned: int = 0
    cost: float = 0.0
    has: dict[str, PlacedAdapter] = field(default_factory=dict[str, PlacedAdapter])
    """By adapter."""

    @property
    def free(self) -> int:
        """Places that are left for adapters that must be here. One stays for those that are loaded on demand."""
        return self.limits.cached - 1 - self.used

    @property
    def spare(self) -> int:
        """Places that are left for adapters that were asked for."""
        return self.limits.cached - max(1, self.limits.cached // _SPARE) - self.used

    def fits(self, why: Why) -> bool:
        if why == "traffic":
            return self.spare > 0
        return self.free > 0 and (why != "pinned" or self.pinned < self.limits.pinned)

    def settled(self, adapter: Adapter) -> bool:
        """Whether requests for it can be answered here at once: with the revision that answers, of a new adapter the
        one that will."""
        resident = self.replica.resident
        return self.replica.ready and resident is not None and _answers(adapter) in resident

    def take(self, uid: str, why: Why, cost: float) -> None:
        self.has[uid] = PlacedAdapter(why, cost)
        self.used += 1
        self.pinned += why == "pinned"
        self.cost += cost

    def leave(self, uid: str) -> None:
        held = self.has.pop(uid)
        self.used -= 1 + held.next
        self.pinned -= held.why == "pinned"
        self.cost -= held.cost

    def join(self, uid: str) -> None:
        """The newer revision stands beside the one that answers."""
        self.has[uid].next = True
        self.used += 1


def _answers(adapter: Adapter) -> str:
    """Engine name of the revision that answers, of a new adapter the one that will."""
    revision = adapter.current or adapter.next
    return revision.name if revision is not None else ""


class PoolBoard:
    """Every replica that may hold something new, by uid."""

    def __init__(self, replicas: Iterable[Replica], limits: Limits, away: Collection[str]) -> None:
        self.places: dict[str, ReplicaSlots] = {
            r.uid: ReplicaSlots(r, r.limits or limits, counts=r.uid not in away, digest=digest(r.uid))
            for r in sorted(replicas, key=lambda r: r.uid)
            if not r.draining
        }
        ready = [p for p in self.places.values() if p.replica.ready]
        self.candidates: list[ReplicaSlots] = ready or list(self.places.values())
        """Where copies may go that are missing: to those that start only if none is ready."""
        self.counting: list[ReplicaSlots] = [p for p in self.places.values() if p.counts]
        self._having: dict[str, list[ReplicaSlots]] = {}
        for place in ready:
            for name in place.replica.resident or ():
                self._having.setdefault(name, []).append(place)

    def having(self, adapter: Adapter) -> list[ReplicaSlots]:
        """Ready replicas whose engines have it: a place there costs no load."""
        return self._having.get(_answers(adapter), [])

    def ranked(self, key: str) -> Iterator[ReplicaSlots]:
        """Candidates in the order in which the adapter belongs to them (`rendezvous`)."""
        name = digest(key)
        if not self.candidates:
            return
        # Mostly the first one has room: the others are put in order only when it has not.
        first = max(self.candidates, key=lambda p: score(name, p.digest))
        yield first
        yield from sorted(
            (p for p in self.candidates if p is not first), key=lambda p: score(name, p.digest), reverse=True
        )
