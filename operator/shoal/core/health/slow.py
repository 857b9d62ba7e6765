"""Replicas that are far slower than the others of their Model and class.

The pace of a replica is how long one token of one answer takes: the time that requests spent running, over the tokens
that were generated. It depends on the batch by a small factor, and not on how many requests a replica gets. What is
compared are whole windows of replicas that had enough to do in the same window. Agents report the figures from within
pods, so the result is the own word of one Model's replicas.

Among fewer than four replicas nobody can say which one is the odd one: what they are asked may differ as much as their
GPUs do. A replica is then far slower only if DCGM measures that the clocks of its GPU are held down, and those of
another replica's are not.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from shoal.core.scaling import Load

WINDOW_SECONDS: Final = 60.0
LEAST_TOKENS: Final = 200
"""Of a window that is compared."""
LEAST_PEERS: Final = 4
"""Replicas of one Model and class, the slow one included, that show by themselves which one is the odd one."""
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
    tokens = load.generation_tokens_total
    fresh = PaceMeter(load.engine_boot, now, now, load.running, tokens, tokens)
    if meter is None or meter.boot != load.engine_boot or now - meter.at > _LONGEST_STEP or tokens < meter.tokens:
        return fresh
    busy = meter.busy + max(0.0, now - meter.at) * (meter.running + load.running) / 2
    if now - meter.began < WINDOW_SECONDS:
        return replace(meter, at=now, running=load.running, tokens=tokens, busy=busy)
    made = tokens - meter.tokens_then
    return replace(fresh, pace=busy / made if made >= LEAST_TOKENS else None)


def far_slower(paces: Mapping[str, float], held_down: Collection[str] = ()) -> dict[str, float]:
    """Replica -> how many times the median its pace is, of those that are far slower. `paces` are of one Model, class
    and window; `held_down`: replicas whose GPU's clocks are."""
    if len(paces) < LEAST_PEERS:
        free = [pace for replica, pace in paces.items() if replica not in held_down]
        usual = median(free) if free else 0.0
        held = {replica: pace for replica, pace in paces.items() if replica in held_down and usual > 0}
        return {replica: pace / usual for replica, pace in held.items() if pace > TIMES_MEDIAN * usual}
    middle = median(paces.values())
    if middle <= 0:
        return {}
    sigma = _MAD_TO_SIGMA * median(abs(pace - middle) for pace in paces.values())
    bound = max(TIMES_MEDIAN * middle, middle + DEVIATIONS * sigma)
    return {replica: pace / middle for replica, pace in paces.items() if pace > bound}


class SlowWatch:
    """The replicas of all Models over time: which are far slower, window after window. Mutable; for one owner."""

    def __init__(self) -> None:
        self._meters: dict[str, PaceMeter] = {}
        self._paces: dict[str, tuple[float, float]] = {}
        """Replica -> (when its window ended, pace)."""
        self._rows: dict[str, int] = {}
        self._times: dict[str, float] = {}

    def report(self, group: Mapping[str, Load | None], now: float, held_down: Collection[str] = ()) -> None:
        """Loads of all ready replicas of one Model and class, by their uids; and those whose GPU's clocks are held
        down."""
        for replica, load in group.items():
            meter = advance(self._meters.get(replica), load, now)
            if meter is None:
                self.forget(replica)
                continue
            self._meters[replica] = meter
            if meter.began == now and meter.pace is not None:
                self._paces[replica] = (now, meter.pace)
                self._judge(replica, group, now, held_down)

    def slow(self, replica: str) -> float | None:
        """How many times the median its pace is, once it has been far slower for long enough."""
        return self._times.get(replica) if self._rows.get(replica, 0) >= WINDOWS else None

    def forget(self, replica: str) -> None:
        for table in (self._meters, self._paces, self._rows, self._times):
            table.pop(replica, None)

    def keep(self, replicas: Collection[str]) -> None:
        """Forgets all others."""
        for gone in [replica for replica in self._meters if replica not in replicas]:
            self.forget(gone)

    def _judge(self, replica: str, group: Iterable[str], now: float, held_down: Collection[str]) -> None:
        latest = {each: self._paces[each] for each in group if each in self._paces}
        fresh = {each: pace for each, (at, pace) in latest.items() if now - at <= 2 * WINDOW_SECONDS}
        named = far_slower(fresh, held_down)
        self._rows[replica] = self._rows.get(replica, 0) + 1 if replica in named else 0
        if replica in named:
            self._times[replica] = named[replica]
