"""Pools of adapters at a moment, for tests of their placement; and replicas that do what their floors say."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from shoal.api.demand import AdapterDemand
from shoal.core.lora.placement import (
    Adapter,
    AdapterSignalSource,
    Limits,
    Plan,
    PoolMemory,
    PoolSnapshot,
    Replica,
    Revision,
    place,
)
from shoal.core.lora.placement.types import Residency

LIMITS = Limits(slots=8, cached=16)


def revision(key: str, number: int = 1, rank: int = 16) -> Revision:
    namespace, _, name = key.partition("/")
    return Revision(f"{namespace}.{name}@{number:012x}", rank, rank * 5_240_000)


def adapter(
    name: str,
    residency: Residency = "OnDemand",
    copies: int = 1,
    *,
    rank: int = 16,
    current: int | None = 1,
    next: int | None = None,
) -> Adapter:
    """`acme/<name>`, whose uid is its name; `current` and `next` number its revisions."""
    key = f"acme/{name}"
    return Adapter(
        uid=name,
        key=key,
        current=None if current is None else revision(key, current, rank),
        next=None if next is None else revision(key, next, rank),
        residency=residency,
        min_copies=copies,
    )


def demand(arrivals: int = 0, in_flight: int = 0, held: int = 0) -> AdapterDemand:
    return AdapterDemand(model="model", arrivals=arrivals, in_flight=in_flight, held=held)


def replica(uid: str, *names: str, **fields: object) -> Replica:
    """A ready one that has these revisions."""
    made = Replica(uid=uid, pod=f"acme/{uid}", ready=True, draining=False, resident=frozenset(names))
    return replace(made, **fields)  # type: ignore[arg-type]


@dataclass
class Pool:
    """A pool whose replicas load what their floors say and unload what leaves them, at once."""

    adapters: dict[str, Adapter] = field(default_factory=dict[str, Adapter])
    replicas: dict[str, Replica] = field(default_factory=dict[str, Replica])
    said: dict[str, AdapterDemand] = field(default_factory=dict[str, AdapterDemand])
    heard: bool = True
    limits: Limits = LIMITS
    now: float = 0.0
    memory: PoolMemory | None = None
    plan: Plan | None = None
    loads: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """(replica, engine name) in the order in which they were loaded."""
    place: Callable[[PoolSnapshot, PoolMemory | None, float], tuple[Plan, PoolMemory]] = place

    @classmethod
    def of(cls, replicas: int, adapters: Iterable[Adapter] = (), **fields: object) -> "Pool":
        pool = cls(**fields)  # type: ignore[arg-type]
        for number in range(replicas):
            pool.replicas[f"r{number}"] = replica(f"r{number}")
        for each in adapters:
            pool.adapters[each.uid] = each
        return pool

    @property
    def snapshot(self) -> PoolSnapshot:
        sources = (AdapterSignalSource("gateway-0", "boot", dict(self.said) if self.heard else None),)
        return PoolSnapshot(self.limits, tuple(self.replicas.values()), dict(self.adapters), sources)

    def ask(self, *names: str, in_flight: int = 0, held: int = 0) -> None:
        """One more request of each, and so many in flight or held from now on."""
        for name in names:
            before = self.said.get(name, demand())
            self.said[name] = demand(before.arrivals + 1, in_flight, held)

    def look(self, seconds: float = 0.0) -> Plan:
        """The plan so many seconds later, not carried out."""
        self.now += seconds
        self.plan, self.memory = self.place(self.snapshot, self.memory, self.now)
        return self.plan

    def step(self, seconds: float = 0.0) -> Plan:
        """The same, carried out."""
        before = self.memory.homes if self.memory else {}
        plan = self.look(seconds)
        for uid, at in self.replicas.items():
            names = {e.name for e in plan.desired[uid]}
            had = at.resident or frozenset()
            left = {r.name for a, homes in before.items() if uid in homes for r in self._revisions(a)} - names
            self.loads += [(uid, name) for name in sorted(names - had)]
            self.replicas[uid] = replace(at, resident=frozenset(had - left | names))
        return plan

    def _revisions(self, uid: str) -> tuple[Revision, ...]:
        return self.adapters[uid].revisions if uid in self.adapters else ()

    def settle(self, steps: int = 60, seconds: float = 10.0) -> Plan:
        """Until nothing moves any more, at most so many steps."""
        plan = self.step(seconds)
        for _ in range(steps):
            plan = self.step(seconds)
        return plan

    def homes(self) -> Mapping[str, frozenset[str]]:
        """By adapter: on whose floors it is."""
        assert self.plan is not None
        return {uid: frozenset(v.homes) for uid, v in self.plan.adapters.items() if v.homes}
