"""How much there was in the last 60 seconds, in buckets of one second.

An amount counts for at least 60 s and for less than 61 s: the bucket that it fell into leaves as a whole. So what is
allowed in any 60 s is never more than the limit, and a limit can be used up to one second's worth less than it allows.
"""

from collections import deque
from collections.abc import Iterator
from typing import Final

WINDOW_SECONDS: Final = 60


class Window:
    """Keeps buckets only for seconds in which there was something, 61 at most. Times are seconds of one clock that
    never goes back."""

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
            self.sum(now)  # lets go of what has left: a window that nobody asks must not grow
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
        """When each bucket leaves, and with how much; the first to leave first."""
        return ((float(second + WINDOW_SECONDS + 1), amount) for second, amount in self._buckets)

    @property
    def ends(self) -> float:
        """When all that is there now will have left; minus infinity: nothing is there."""
        return float(self._buckets[-1][0] + WINDOW_SECONDS + 1) if self._buckets else float("-inf")
