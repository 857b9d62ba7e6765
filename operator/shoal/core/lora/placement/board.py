"""The replicas of a pool while a plan is made, and their places for adapters."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from shoal.core.lora.placement.rendezvous import digest, score
from shoal.core.lora.placement.types import Adapter, Limits, Replica, Why

_SPARE = 8
"""One in so many places in host memory is left to adapters without a plan."""


@dataclass(slots=True)
class PlacedAdapter:
    """An adapter that one replica should hold."""

    why: Why
    cost: float
    next: bool = False
    """Its next revision is placed beside the current one."""


@dataclass(slots=True)
class ReplicaSlots:
    """One replica, and the adapters planned for it so far."""

    replica: Replica
    limits: Limits
    counts: bool
    """Its adapters count as copies; False once it has not been ready for long."""
    digest: int
    used: int = 0
    """Revisions planned for it."""
    pinned: int = 0
    cost: float = 0.0
    has: dict[str, PlacedAdapter] = field(default_factory=dict[str, PlacedAdapter])
    """By uid of the adapter."""

    @property
    def free(self) -> int:
        """Places left for pinned and warm adapters. One place stays for adapters on demand."""
        return self.limits.cached - 1 - self.used

    @property
    def spare(self) -> int:
        """Places left for adapters with requests."""
        return self.limits.cached - max(1, self.limits.cached // _SPARE) - self.used

    def fits(self, why: Why) -> bool:
        if why == "traffic":
            return self.spare > 0
        return self.free > 0 and (why != "pinned" or self.pinned < self.limits.pinned)

    def settled(self, adapter: Adapter) -> bool:
        """Whether requests for the adapter can be served here at once: the replica is ready and has its current
        revision (of a new adapter: the next one)."""
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
        """Places the next revision beside the current one."""
        self.has[uid].next = True
        self.used += 1


def _answers(adapter: Adapter) -> str:
    """Engine name of the current revision, of a new adapter of the next one."""
    revision = adapter.current or adapter.next
    return revision.name if revision is not None else ""


class PoolBoard:
    """All replicas that may get new adapters, by uid."""

    def __init__(self, replicas: Iterable[Replica], limits: Limits, away: Collection[str]) -> None:
        self.places: dict[str, ReplicaSlots] = {
            r.uid: ReplicaSlots(r, r.limits or limits, counts=r.uid not in away, digest=digest(r.uid))
            for r in sorted(replicas, key=lambda r: r.uid)
            if not r.draining
        }
        ready = [p for p in self.places.values() if p.replica.ready]
        self.candidates: list[ReplicaSlots] = ready or list(self.places.values())
        """Replicas for missing copies: the ready ones; if none is ready, those that start."""
        self.counting: list[ReplicaSlots] = [p for p in self.places.values() if p.counts]
        self._having: dict[str, list[ReplicaSlots]] = {}
        for place in ready:
            for name in place.replica.resident or ():
                self._having.setdefault(name, []).append(place)

    def having(self, adapter: Adapter) -> list[ReplicaSlots]:
        """Ready replicas that have loaded the adapter, so that a copy there costs no load."""
        return self._having.get(_answers(adapter), [])

    def ranked(self, key: str) -> Iterator[ReplicaSlots]:
        """Candidates in the adapter's rendezvous order."""
        name = digest(key)
        if not self.candidates:
            return
        # Mostly the first one has a place: the others are sorted only when it has none.
        first = max(self.candidates, key=lambda p: score(name, p.digest))
        yield first
        yield from sorted(
            (p for p in self.candidates if p is not first), key=lambda p: score(name, p.digest), reverse=True
        )
