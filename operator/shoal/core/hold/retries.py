"""How often requests may be sent again: a budget per Model, so that a dying one is not hammered.

Every request that is sent adds a fifth of a retry, and time adds a few, so that a Model with little traffic has some
too. A retry costs one; where it brings an answer it is given back with another one on top, so that a Model that has
recovered takes what waits at a rate that doubles, and one that has not gets no more than its share.
"""

from typing import Final

RATIO: Final = 0.2
PER_SECOND: Final = 1.0
MOST: Final = 100.0
FIRST: Final = 10.0


class RetryBudget:
    """Times are seconds of one monotonic clock."""

    __slots__ = ("_at", "_tokens")

    def __init__(self, now: float) -> None:
        self._tokens = FIRST
        self._at = now

    def sent(self) -> None:
        """A request was sent for the first time."""
        if self._tokens < MOST:
            self._tokens += RATIO

    def take(self, now: float) -> bool:
        """Whether one may be sent again; if so it is paid."""
        self._tokens = min(MOST, self._tokens + max(0.0, now - self._at) * PER_SECOND)
        self._at = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True

    def answered(self) -> None:
        """A request that was sent again brought an answer."""
        self._tokens = min(MOST, self._tokens + 2.0)

    def unused(self) -> None:
        """What was paid was not used: the client left."""
        self._tokens = min(MOST, self._tokens + 1.0)
