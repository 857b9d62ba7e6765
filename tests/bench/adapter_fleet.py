"""Replicas with adapters in virtual time, and the policies that place adapters on them.

An engine has places in host memory and slots; loads are one after the other. A request waits for a slot of its adapter,
then for its load. The GPU itself is never short: what is measured is what adapters cost.
"""

import heapq
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

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
from shoal.core.lora.placement.rendezvous import digest, score
from tests.bench.adapter_loads import Load, Request

LOAD_SECONDS = 0.0015
"""Of a load, whatever it is of."""
BANDWIDTH = 2e9
"""Bytes per second at which the engine reads files of the node's disk."""
BYTES_PER_RANK = 5_240_000
"""All linear layers of Llama-3.1-8B in bfloat16."""
RANKS = (8, 16, 16, 32, 64)
ROOM = 32
"""Requests in flight with which a replica has room for more."""


def rank(adapter: int) -> int:
    return RANKS[digest(str(adapter)) % len(RANKS)]


def seconds_to_load(adapter: int) -> float:
    return LOAD_SECONDS + rank(adapter) * BYTES_PER_RANK / BANDWIDTH


@dataclass(slots=True)
class Engine:
    number: int
    places: int
    slots: int
    resident: OrderedDict[int, float] = field(default_factory=OrderedDict[int, float])
    """Adapter -> when its load is through; the one used longest ago first."""
    active: Counter[int] = field(default_factory=Counter[int])
    waiting: deque[tuple[Request, bool]] = field(default_factory=deque[tuple[Request, bool]])
    floor: set[int] = field(default_factory=set[int])
    dropped: set[int] = field(default_factory=set[int])
    free_at: float = 0.0
    in_flight: int = 0
    loads: int = 0
    uid: str = ""
    digest: int = 0

    def has(self, adapter: int, now: float) -> bool:
        return self.resident.get(adapter, math.inf) <= now

    def slot(self, adapter: int) -> bool:
        return adapter in self.active or len(self.active) < self.slots

    def load(self, adapter: int, now: float) -> float:
        """When it is there. Whatever was used longest ago and is not in use makes room, off the floor first."""
        if adapter in self.resident:
            self.resident.move_to_end(adapter)
            return self.resident[adapter]
        while len(self.resident) >= self.places:
            idle = [a for a in self.resident if a not in self.active]
            self.resident.pop(next((a for a in idle if a not in self.floor), idle[0]))
        self.free_at = max(now, self.free_at) + seconds_to_load(adapter)
        self.resident[adapter] = self.free_at
        self.loads += 1
        return self.free_at

    def set_floor(self, floor: set[int], now: float) -> None:
        self.dropped = (self.dropped | (self.floor - floor)) - floor
        self.floor = floor
        self.retire()
        for adapter in sorted(floor - self.resident.keys()):
            if len(self.resident) < self.places or any(a not in self.floor | self.active.keys() for a in self.resident):
                self.load(adapter, now)

    def retire(self) -> None:
        for adapter in [a for a in self.dropped if a not in self.active]:
            self.dropped.discard(adapter)
            self.resident.pop(adapter, None)


class Policy:
    """Routes, and moves adapters."""

    name = ""
    every = math.inf
    """Seconds between two looks."""

    def begin(self, engines: Sequence[Engine], adapters: int) -> None:
        self.engines = engines

    def choose(self, adapter: int, now: float) -> Engine:
        raise NotImplementedError

    def asked(self, adapter: int, change: int) -> None:
        """A request came (1) or ended (-1)."""

    def look(self, now: float) -> None:
        """Something is done about the placement."""


def _least(engines: Sequence[Engine]) -> Engine:
    return min(engines, key=lambda e: e.in_flight)


class EverywhereLRU(Policy):
    """Every replica is to have all adapters, and the engine keeps what fits: requests go to the least busy replica."""

    name = "all on all"

    def choose(self, adapter: int, now: float) -> Engine:
        return _least(self.engines)


class LRU(Policy):
    """Loaded where the first request went; those that have it first. No placement."""

    name = "LRU, least busy"

    def choose(self, adapter: int, now: float) -> Engine:
        have = [e for e in self.engines if e.has(adapter, now)]
        for found in (
            [e for e in have if e.slot(adapter) and e.in_flight < ROOM],
            [e for e in self.engines if e.slot(adapter) and e.in_flight < ROOM],
            [e for e in have if e.slot(adapter)],
        ):
            if found:
                return self.prefer(found, adapter) if found[0] not in have else _least(found)
        return _least(have or self.engines)

    def prefer(self, engines: Sequence[Engine], adapter: int) -> Engine:
        return _least(engines)


class HomeLRU(LRU):
    """The same, but loaded at its home by rendezvous: Shoal without a plan."""

    name = "LRU, rendezvous"

    def prefer(self, engines: Sequence[Engine], adapter: int) -> Engine:
        name = digest(_key(adapter))
        return max(engines, key=lambda e: score(name, e.digest))


class FirstN(Policy):
    """Placed by name as long as there are places; the others are loaded in a place that is kept for that."""

    name = "first N by name"

    def begin(self, engines: Sequence[Engine], adapters: int) -> None:
        super().begin(engines, adapters)
        self.at = {a: a % len(engines) for a in range(min(adapters, len(engines) * (engines[0].places - 8)))}
        for engine in engines:
            engine.floor = {a for a, home in self.at.items() if home == engine.number}
            engine.resident.update(dict.fromkeys(sorted(engine.floor), 0.0))

    def choose(self, adapter: int, now: float) -> Engine:
        home = self.at.get(adapter)
        return self.engines[home] if home is not None else _least(self.engines)


class Planned(HomeLRU):
    """Shoal: floors of the plan, made every so many seconds."""

    name = "Shoal"
    every = 10.0

    def begin(self, engines: Sequence[Engine], adapters: int) -> None:
        super().begin(engines, adapters)
        self.adapters = {str(a): _adapter(a) for a in range(adapters)}
        self.counts: dict[int, list[int]] = {}
        self.changed: set[int] = set()
        self.said: dict[str, AdapterDemand] = {}
        self.memory: PoolMemory | None = None
        self.plan: Plan | None = None
        self.moves = 0
        self.look(0.0)

    def asked(self, adapter: int, change: int) -> None:
        count = self.counts.setdefault(adapter, [0, 0])
        count[0] += change > 0
        count[1] += change
        self.changed.add(adapter)

    def look(self, now: float) -> None:
        self.said = dict(self.said)
        for a in self.changed:
            arrivals, in_flight = self.counts[a]
            self.said[str(a)] = AdapterDemand(model="m", arrivals=arrivals, in_flight=in_flight)
        self.changed.clear()
        replicas = tuple(
            Replica(e.uid, e.uid, True, False, frozenset(_name(a) for a in e.resident if e.has(a, now)))
            for e in self.engines
        )
        limits = Limits(self.engines[0].slots + 1, self.engines[0].places)
        seen = PoolSnapshot(limits, replicas, self.adapters, (AdapterSignalSource("gateway", "boot", self.said),))
        self.plan, self.memory = place(seen, self.memory, now)
        for engine in self.engines:
            engine.set_floor({int(entry.adapter) for entry in self.plan.desired[engine.uid]}, now)


def _key(adapter: int) -> str:
    return f"acme/a{adapter}"


def _name(adapter: int) -> str:
    return f"acme.a{adapter}@{adapter:012x}"


def _adapter(number: int) -> Adapter:
    held = rank(number)
    return Adapter(str(number), _key(number), Revision(_name(number), held, held * BYTES_PER_RANK))


@dataclass(slots=True)
class Stats:
    hits: float
    loads_per_minute: float
    penalty: list[float]
    """Seconds that a request waited for its adapter, one per request, sorted."""

    def percentile(self, share: float) -> float:
        return self.penalty[min(len(self.penalty) - 1, int(share * len(self.penalty)))]


def fleet(replicas: int, places: int, slots: int) -> list[Engine]:
    engines = [Engine(i, places, slots - 1) for i in range(replicas)]
    for engine in engines:
        engine.uid = f"replica-{engine.number:02}"
        engine.digest = digest(engine.uid)
    return engines


def play(load: Load, policy: Policy, engines: list[Engine]) -> Stats:
    """All requests of the load, one after the other."""
    policy.begin(engines, load.adapters)
    ends: list[tuple[float, int, int, Engine]] = []
    hits = counted = order = 0
    warm_loads = 0
    penalty: list[float] = []
    due = policy.every

    def start(engine: Engine, request: Request, now: float) -> None:
        nonlocal order
        engine.active[request.adapter] += 1
        begins = max(now, engine.load(request.adapter, now))
        if request.at >= load.warm:
            penalty.append(begins - request.at)
        order += 1
        heapq.heappush(ends, (begins + request.seconds, order, request.adapter, engine))

    def advance(until: float) -> None:
        while ends and ends[0][0] <= until:
            now, _, adapter, engine = heapq.heappop(ends)
            engine.in_flight -= 1
            policy.asked(adapter, -1)
            engine.active[adapter] -= 1
            if not engine.active[adapter]:
                del engine.active[adapter]
                engine.retire()
            left = deque[tuple[Request, bool]]()
            for request, hit in engine.waiting:
                if engine.slot(request.adapter):
                    start(engine, request, now)
                else:
                    left.append((request, hit))
            engine.waiting = left

    for request in load.requests:
        while due <= request.at:
            advance(due)
            policy.look(due)
            due += policy.every
        advance(request.at)
        engine = policy.choose(request.adapter, request.at)
        hit = engine.has(request.adapter, request.at)
        if request.at >= load.warm:
            warm_loads = warm_loads or sum(e.loads for e in engines)
            hits += hit
            counted += 1
        engine.in_flight += 1
        policy.asked(request.adapter, 1)
        if engine.slot(request.adapter):
            start(engine, request, request.at)
        else:
            engine.waiting.append((request, hit))
    advance(math.inf)
    minutes = (load.requests[-1].at - load.warm) / 60
    loads = sum(e.loads for e in engines) - warm_loads
    return Stats(hits / max(1, counted), loads / minutes, sorted(penalty))


def belady(load: Load, places: int) -> float:
    """Hit rate of one cache of all places that knows the future: no policy has more of them with one copy each."""
    following: list[float] = [math.inf] * len(load.requests)
    last: dict[int, int] = {}
    for at in range(len(load.requests) - 1, -1, -1):
        adapter = load.requests[at].adapter
        following[at] = last.get(adapter, math.inf)
        last[adapter] = at
    cached: dict[int, float] = {}
    farthest: list[tuple[float, int]] = []
    hits = counted = 0
    for at, request in enumerate(load.requests):
        if request.at >= load.warm:
            counted += 1
            hits += request.adapter in cached
        cached[request.adapter] = following[at]
        heapq.heappush(farthest, (-following[at], request.adapter))
        while len(cached) > places:
            when, adapter = heapq.heappop(farthest)
            if cached.get(adapter) == -when:
                del cached[adapter]
    return hits / max(1, counted)
