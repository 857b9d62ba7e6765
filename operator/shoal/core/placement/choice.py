"""Which classes serve which part of the demand, for the least cost per hour.

Demand comes in buckets (requests of like sizes). A bucket needs a number of replicas of each class that can serve it in
time, a broken number; it may be shared among classes in equal slices. Whole replicas are paid for: the problem of
Melange (Griggs et al., 2404.14527). Here it is solved by greedy starts and a local search: no solver, no randomness.
With few replicas a search ends where no small change helps and a large one would; so it begins anew with each class
looking a little cheaper than it is, and the best end counts.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, islice
from math import ceil, inf
from typing import Final

_TINY: Final = 1e-9
_ROUNDS: Final = 40
_MOST: Final = 6
"""Replicas of one class that one change may drop."""
_LURE: Final = 0.85
"""What a class costs of its price, in the eyes of a start that favours it."""
_ENOUGH: Final = 1.002
"""An end that costs no more than this many times what parts of replicas would cost is good enough."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Requests of like sizes."""

    name: str
    load: Mapping[str, float]
    """Class -> replicas that the whole bucket keeps busy; a class that cannot serve it in time is left out."""


@dataclass(frozen=True, slots=True)
class Offered:
    """A class to choose from."""

    name: str
    hourly_cost: float
    """Of one replica."""
    limit: int | None = None
    """Replicas there is room for; None: any number."""


@dataclass(frozen=True, slots=True)
class Choice:
    replicas: Mapping[str, int]
    """Class -> replicas; classes without any left out."""
    slices: Mapping[str, Mapping[str, int]]
    """Bucket -> class -> slices of it."""
    hourly_cost: float
    unserved: tuple[str, ...]
    """Buckets that no class can serve in time, or not all of it for want of room."""


def choose(buckets: Sequence[Bucket], classes: Sequence[Offered], *, slices: int = 8) -> Choice:
    """Replicas per class for the whole demand. Raises ValueError for less than one slice per bucket."""
    if slices < 1:
        raise ValueError(f"a bucket has at least one slice, not {slices}")
    search = _Search(buckets, classes, slices)
    best = search.solve(None)
    for start in range(len(search.classes)):
        if not any(best.left) and best.cost <= _ENOUGH * search.floor:
            break
        best = min(best, search.solve(start), key=lambda end: (sum(end.left), end.cost))
    return search.choice(buckets, best)


@dataclass(frozen=True, slots=True)
class _End:
    """Where a search ended."""

    on: list[list[int]]
    count: list[int]
    left: list[int]
    cost: float


class _Search:
    """Mutable: slices of buckets (s) on classes (g), and the whole replicas that they need."""

    def __init__(self, buckets: Sequence[Bucket], classes: Sequence[Offered], slices: int) -> None:
        self.classes = sorted(classes, key=lambda c: (c.hourly_cost, c.name))
        self.cost = [c.hourly_cost for c in self.classes]
        self.limit = [inf if c.limit is None else c.limit for c in self.classes]
        self.size = [[b.load.get(c.name, inf) / slices for c in self.classes] for b in buckets]
        self.slices = slices
        costs = [[size * c for size, c in zip(sizes, self.cost, strict=True) if size < inf] for sizes in self.size]
        self.floor = sum(slices * min(of, default=0.0) for of in costs)
        """What it would cost if parts of replicas could be had."""
        every = range(len(self.classes))
        self._empty()
        # From each class, where to go, the least loss first: what a slice costs there over what it costs here.
        self.ways: list[list[tuple[int, int]]] = []
        for g in every:
            ways = [
                (self.size[s][h] * self.cost[h] / (self.size[s][g] * self.cost[g] or _TINY), s, h)
                for s in range(len(buckets))
                for h in every
                if h != g and self.size[s][g] < inf and self.size[s][h] < inf
            ]
            self.ways.append([(s, h) for _, s, h in sorted(ways)])
        drops = [d for n in (1, 2) for d in combinations_with_replacement(every, n)]
        drops += [(g,) * n for g in every for n in range(3, _MOST + 1)]
        adds = [a for n in (0, 1, 2) for a in combinations_with_replacement(every, n)]
        changes = [
            (sum(self.cost[h] for h in add) - sum(self.cost[g] for g in drop), drop, add)
            for drop in drops
            for add in adds
            if not set(drop) & set(add)
        ]
        self.changes = sorted(change for change in changes if change[0] < -_TINY)
        """(what it costs more, replicas dropped, replicas added), what saves most first."""

    def _empty(self) -> None:
        self.on = [[0 for _ in self.classes] for _ in self.size]
        self.load = [0.0 for _ in self.classes]
        self.count = [0 for _ in self.classes]
        self.left = [self.slices for _ in self.size]
        """Slices that nobody serves."""

    def solve(self, start: int | None) -> _End:
        """Searches from the beginning, with class `start` looking cheaper than it is while slices are first served."""
        self._empty()
        cost = [c * (_LURE if g == start else 1.0) for g, c in enumerate(self.cost)]
        while self._serve(cost):  # what is put together may make room under a limit
            for _ in range(_ROUNDS):
                if not self._improve():
                    break
        return _End(self.on, self.count, self.left, sum(n * c for n, c in zip(self.count, self.cost, strict=True)))

    def _serve(self, cost: Sequence[float]) -> bool:
        """Each slice that nobody serves on the class where it costs least, as far as there is room; those with the
        fewest classes to go to first. False when nothing was found to do."""
        found = False
        for s in sorted(range(len(self.size)), key=lambda s: (sum(size < inf for size in self.size[s]), s)):
            sizes, left = self.size[s], self.left[s]
            for g in sorted((g for g, size in enumerate(sizes) if size < inf), key=lambda g: sizes[g] * cost[g]):
                room = self.limit[g] - self.load[g]
                take = left if sizes[g] * left <= room else max(0, int(room / sizes[g] + _TINY))
                self.on[s][g] += take
                self.load[g] += take * sizes[g]
                left -= take
                found = found or take > 0
            self.left[s] = left
        self.count = [max(n, ceil(load - _TINY)) for n, load in zip(self.count, self.load, strict=True)]
        return found

    def _improve(self) -> bool:
        """Makes the best of the changes by a few replicas that save money; False where there is none."""
        # Slack has to take what is moved, and a change takes as much of it as it saves: most would take too much.
        slack = sum((n - load) * c for n, load, c in zip(self.count, self.load, self.cost, strict=True))
        first = bisect_left(self.changes, -slack - _TINY, key=lambda change: change[0])
        return any(self._try(drop, add) for _, drop, add in islice(self.changes, first, None))

    def _try(self, drop: Sequence[int], add: Sequence[int]) -> bool:
        count = list(self.count)
        for g in drop:
            count[g] -= 1
        for h in add:
            count[h] += 1
        if any(n < 0 or n > self.limit[g] for g, n in enumerate(count)):
            return False
        moved: list[tuple[int, int, int, int]] = []
        for g in dict.fromkeys(drop):
            if not self._relieve(g, count, moved):
                for s, h, of, n in reversed(moved):
                    self._move(s, h, of, n)
                return False
        self.count = count
        return True

    def _relieve(self, g: int, count: list[int], moved: list[tuple[int, int, int, int]]) -> bool:
        """Moves slices off a class until it is no more loaded than its replicas can bear."""
        over = self.load[g] - count[g]
        for s, h in self.ways[g]:
            if over <= _TINY:
                return True
            have = self.on[s][g]
            if not have:
                continue
            room = int((count[h] - self.load[h] + _TINY) / self.size[s][h]) if self.size[s][h] else have
            take = min(have, room, ceil(over / self.size[s][g] - _TINY))
            if take > 0:
                self._move(s, g, h, take)
                moved.append((s, h, g, take))
                over -= take * self.size[s][g]
        return over <= _TINY

    def _move(self, s: int, g: int, h: int, slices: int) -> None:
        self.on[s][g] -= slices
        self.on[s][h] += slices
        self.load[g] -= slices * self.size[s][g]
        self.load[h] += slices * self.size[s][h]

    def choice(self, buckets: Sequence[Bucket], end: _End) -> Choice:
        names = [c.name for c in self.classes]
        return Choice(
            replicas={names[g]: n for g, n in enumerate(end.count) if n},
            slices={b.name: {names[g]: n for g, n in enumerate(end.on[s]) if n} for s, b in enumerate(buckets)},
            hourly_cost=end.cost,
            unserved=tuple(b.name for s, b in enumerate(buckets) if end.left[s]),
        )
