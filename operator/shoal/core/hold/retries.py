"""Sending requests again: which request may be, and how many of a Model.

**Budget.** Each request that is sent adds a fifth of a retry, and each second adds one, so that a Model with little
traffic has some too. A retry costs one. If it succeeds, it is returned with another one on top: requests to a Model
that has recovered grow exponentially, while a Model that still fails gets no more than its budget.

**Suspects.** A request whose replica died under it, before any byte of an answer, is suspect: it may have killed
the replica, or only have been there at the time. It may cost one more replica, and never a third. A refused connection,
a clean 503, a connection that broke while the engine lives on, and a replica that was leaving anyway say nothing about
the request.
"""

from dataclasses import dataclass
from typing import Final, Literal

RATIO: Final = 0.2
PER_SECOND: Final = 1.0
MOST: Final = 100.0
FIRST: Final = 10.0

MOST_DEATHS: Final = 2
"""Replicas that may die under one request: the first may have any cause, a second one is the limit."""

Next = Literal["again", "tried", "suspect"]
"""again: another replica may get it. tried: enough replicas failed; the client may send it again later. suspect: it is
never sent again."""


class RetryBudget:
    """Times are monotonic seconds."""

    __slots__ = ("_at", "_tokens")

    def __init__(self, now: float) -> None:
        self._tokens = FIRST
        self._at = now

    def sent(self) -> None:
        """A request was sent for the first time."""
        if self._tokens < MOST:
            self._tokens += RATIO

    def take(self, now: float) -> bool:
        """Takes a retry; False: there is none left."""
        self._tokens = min(MOST, self._tokens + max(0.0, now - self._at) * PER_SECOND)
        self._at = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True

    def answered(self) -> None:
        """A retry succeeded."""
        self._tokens = min(MOST, self._tokens + 2.0)

    def unused(self) -> None:
        """A retry was taken and not used, because the client left."""
        self._tokens = min(MOST, self._tokens + 1.0)


@dataclass(frozen=True, slots=True)
class Loss:
    """How a request lost its replica before the first byte of an answer."""

    stalled: bool = False
    """The replica no longer made progress."""
    answers: bool = False
    """The same boot of the engine answers on a new connection."""
    leaving: bool = False
    """The replica was being deleted or drained, so its end was decided before."""


def died(loss: Loss) -> bool:
    """Whether the request may be the cause."""
    return loss.stalled or not (loss.answers or loss.leaving)


def after(deaths: int, losses: int, most: int) -> Next:
    """What becomes of a request that lost `losses` replicas, of which `deaths` died under it; `most`: losses that one
    request may have."""
    if deaths >= MOST_DEATHS:
        return "suspect"
    return "tried" if losses >= most else "again"
