"""Replicas that are far slower than the others of their Model and class.

The pace of a replica is how long one token of one answer takes: the time that requests spent running, over the tokens
that were generated. It depends on the batch by a small factor, and not on how many requests a replica gets. What is
compared are whole windows of replicas that had enough to do in the same window. Agents report the figures from within
pods, so the result is the own word of one Model's replicas.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from shoal.core.scaling import Load

WINDOW_SECONDS: Final = 60.0
LEAST_TOKENS: Final = 200
"""Of a window that is compared."""
LEAST_PEERS: Final = 4
"""Replicas of one Model and class, the slow one included. Of fewer, nobody can say which one is the odd one."""
TIMES_MEDIAN: Final = 3.0
"""A pace is far slower from this multiple of the median on."""
DEVIATIONS: Final = 6.0
"""And by so many (robust) standard deviations: paces that differ anyway make nobody slow."""
WINDOWS: Final = 5
"""In a row, in which a replica has to be far slower."""
_MAD_TO_SIGMA: Final = 1.4826
_LONGEST_STEP: Final = 15.0
"""Seconds between two reports; after a longer gap a window begins anew."""


@dataclass(frozen=True, slots=True)
class PaceMeter:
    """One replica since its window began."""

    boot: str | None
    began: float
    at: float
    running: int
    tokens_then: int
    tokens: int
    busy: float = 0.0
    """Seconds that requests spent running."""
    pace: float | None = None
    """Seconds per token in the last whole window; None: it had too little to do."""


def advance(meter: PaceMeter | None, load: Load | None, now: float) -> PaceMeter | None:
    """With a report at `now`, in monotonic seconds. None: nothing is known of the replica."""
    if load is None or load.running is None or load.generation_tokens_total is None or load.running < 0:
        return None
    fresh = PaceMeter(
        load.engine_boot, now, now, load.running, load.generation_tokens_total, load.generation_tokens_total
    )
    if meter is None or meter.boot != load.engine_boot or now - meter.at > _LONGEST_STEP or tokens < meter.tokens:
        return fresh
    busy = meter.busy + max(0.0, now - meter.at) * (meter.running + load.running) / 2
    if now - meter.began < WINDOW_SECONDS:
        return replace(meter, at=now, running=load.running, tokens=tokens, busy=busy)
    made = tokens - meter.tokens_then
    return replace(fresh, pace=busy / made if made >= LEAST_TOKENS else None)


def far_slower(paces: Mapping[str, float]) -> dict[str, float]:
    """Replica -> how many times the median its pace is, of those that are far slower. `paces` are of one Model, class
    and window."""
    if len(paces) < LEAST_PEERS:
        return {}
    middle = median(paces.values())
    if middle <= 0:
        return {}
    sigma = _MAD_TO_SIGMA * median(abs(pace - middle) for pace in paces.values())
    bound = max(TIMES_MEDIAN * middle, middle + DEVIATIONS * sigma)
    return {replica: pace / middle for replica, pace in paces.items() if pace > bound}
