"""A sliding sum over the last 60 seconds, in buckets of one second.

An amount counts for at least 60 s and less than 61 s, since a bucket leaves as a whole. Use in any 60 s therefore never
exceeds the limit, and may stay below it by one second's worth.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

WINDOW_SECONDS: Final = 60


class Window:
    """Keeps buckets only for seconds with an amount, 61 at most. Times are monotonic seconds."""

    __slots__ = ("_buckets", "_leaves", "_sum", "ends")

    def __init__(self) -> None:
        self._buckets: deque[list[int]] = deque()
        self._sum = 0
        self._leaves = math.inf
        """When the first bucket leaves: until then there is nothing to drop."""
        self.ends = -math.inf
        """When all current amounts will have left; minus infinity: the window is empty."""

    def add(self, now: float, amount: int) -> None:
        second = int(now)
        buckets = self._buckets
        if buckets and buckets[-1][0] == second:
            buckets[-1][1] += amount
        else:
            self.sum(now)  # drops expired buckets, so that a window nobody reads does not grow
            self.ends = float(second + WINDOW_SECONDS + 1)
            if not buckets:
                self._leaves = self.ends
            buckets.append([second, amount])
        self._sum += amount

    def sum(self, now: float) -> int:
        if now >= self._leaves:
            self._drop(now)
        return self._sum

    def leaving(self) -> Iterator[tuple[float, int]]:
        """(time, amount) at which each bucket leaves, the first first."""
        return ((float(second + WINDOW_SECONDS + 1), amount) for second, amount in self._buckets)

    def aged(self, now: float) -> Sequence[tuple[int, int]]:
        """(age, amount) of each bucket, the oldest first: whole seconds since the bucket's second, 0 to 60."""
        if not self.sum(now):
            return ()
        second = int(now)
        return [(max(0, second - bucket), amount) for bucket, amount in self._buckets]

    def restore(self, now: float, aged: Iterable[tuple[int, int]]) -> None:
        """Replaces what it has by another window's `aged`, the oldest first. Seconds of two clocks begin at different
        moments: an amount counts less than 2 s longer than in the other window, or, if its age is 0, less than 1 s
        shorter, but 60 s at least from when it was used."""
        buckets, second = self._buckets, int(now)
        buckets.clear()
        for age, amount in aged:
            at = second - max(0, age - 1)
            if not amount:
                continue
            if buckets and buckets[-1][0] == at:
                buckets[-1][1] += amount
            else:
                buckets.append([at, amount])
        self._count()

    def cover(self, now: float, aged: Iterable[tuple[int, int]]) -> None:
        """Makes the sum at least that of another window now, and at any later time while nothing is added. `aged` is as
        in `restore`."""
        if not self.sum(now):
            self.restore(now, aged)
            return
        other = Window()
        other.restore(now, aged)
        ours = {bucket[0]: bucket[1] for bucket in self._buckets}
        theirs = {bucket[0]: bucket[1] for bucket in other._buckets}
        own = others = covered = 0
        self._buckets.clear()
        for second in sorted(ours.keys() | theirs.keys(), reverse=True):
            own, others = own + ours.get(second, 0), others + theirs.get(second, 0)
            if (amount := max(own, others) - covered) > 0:
                self._buckets.appendleft([second, amount])
                covered += amount
        self._count()

    def _count(self) -> None:
        """After the buckets were replaced."""
        buckets = self._buckets
        self._sum = sum(amount for _, amount in buckets)
        self._leaves = float(buckets[0][0] + WINDOW_SECONDS + 1) if buckets else math.inf
        self.ends = float(buckets[-1][0] + WINDOW_SECONDS + 1) if buckets else -math.inf

    def _drop(self, now: float) -> None:
        """Drops the buckets that have left."""
        buckets, oldest = self._buckets, int(now) - WINDOW_SECONDS
        while buckets and buckets[0][0] < oldest:
            self._sum -= buckets.popleft()[1]
        if buckets:
            self._leaves = float(buckets[0][0] + WINDOW_SECONDS + 1)
        else:
            self._leaves, self.ends = math.inf, -math.inf
