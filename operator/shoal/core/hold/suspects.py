"""Whether a request may be what ends replicas, and whether it may be sent again.

A request whose replica died under it, before any byte of an answer, is suspect: nothing tells it from one that was only
there at the time. So it may cost one more replica, and never a third. A connection that was refused, a clean 503, a
connection that broke while its engine lives on, and a replica that was leaving anyway say nothing about the request.
"""

from dataclasses import dataclass
from typing import Final, Literal

MOST_DEATHS: Final = 2
"""Replicas that one request may be lost with: the first may be anything's fault, the second is one too many."""

Next = Literal["again", "tried", "suspect"]
"""again: another replica may get it. tried: enough of them had it in vain; the same request may come again later.
suspect: it goes nowhere any more."""


@dataclass(frozen=True, slots=True)
class Loss:
    """How a replica that had taken a request was lost to it before the first byte of an answer."""

    stalled: bool = False
    """The replica made no progress any more."""
    answers: bool = False
    """The engine answers on a new connection, in the same life as before."""
    leaving: bool = False
    """The replica was being deleted or drained: its end was decided before."""


def died(loss: Loss) -> bool:
    """Whether the request may be the reason."""
    return loss.stalled or not (loss.answers or loss.leaving)


def after(deaths: int, losses: int, most: int) -> Next:
    """What becomes of a request after `losses` replicas were lost to it, `deaths` of them by dying under it; `most`:
    losses that one request may have."""
    if deaths >= MOST_DEATHS:
        return "suspect"
    return "tried" if losses >= most else "again"
