"""A sliding sum over the last 60 seconds, in buckets of one second.

An amount counts for at least 60 s and less than 61 s, since a bucket leaves as a whole. Use in any 60 s therefore never
exceeds the limit, and may stay below it by one second's worth.
"""

from collections import deque
from collections.abc import Iterator
from typing import Final

WINDOW_SECONDS: Final = 60


class Window:
    """Keeps buckets only for seconds with an amount, 61 at most. Times are monotonic seconds."""

    __slots__ = ("_buckets", "_sum")

    def __init__(self) -> None:
        self._buckets: deque[list[int]] = deque()
        self._sum = 0

    def add(self, now: float, amount: int) -> None:
        second = int(now)
        buckets = self._buckets
        if buckets and buckets[-1][0] == second:
            buckets[-1][1] += amount
        else:
            self.sum(now)  # drops expired buckets, so that a window nobody reads does not grow
            buckets.append([second, amount])
        self._sum += amount

    def sum(self, now: float) -> int:
        buckets = self._buckets
        if buckets:
            oldest = int(now) - WINDOW_SECONDS
            while buckets and buckets[0][0] < oldest:
                self._sum -= buckets.popleft()[1]
        return self._sum

    def leaving(self) -> Iterator[tuple[float, int]]:
        """(time, amount) at which each bucket leaves, the first first."""
        return ((float(second + WINDOW_SECONDS + 1), amount) for second, amount in self._buckets)

    @property
    def ends(self) -> float:
        """When all current amounts will have left; minus infinity: the window is empty."""
        return float(self._buckets[-1][0] + WINDOW_SECONDS + 1) if self._buckets else float("-inf")
