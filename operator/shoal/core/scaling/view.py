"""What every rule looks at: one Model at one moment, with what was learned before."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from shoal.core.scaling.figures import Figures
from shoal.core.scaling.fleet import Fleet, Slot
from shoal.core.scaling.types import Memory, Snapshot


@dataclass(frozen=True, slots=True)
class View:
    snapshot: Snapshot
    said: Figures
    fleet: Fleet
    memory: Memory
    now: float

    @property
    def placed(self) -> int:
        return len(self.fleet.placed)

    def tokens(self, slot: Slot) -> float:
        """KV tokens that a replica may fill: its target share."""
        return (slot.kv_tokens or 0) * self.snapshot.policy.kv_percent / 100 if slot.serves else 0.0

    def speed(self, slot: Slot) -> float:
        """Learned work per second; of another class's replicas, where nothing was learned of this one."""
        if not slot.serves:
            return 0.0
        speed = self.memory.speeds.get(slot.gpu_class)
        if speed is not None and speed.learned is not None:
            return speed.learned
        return self.any_speed or 0.0

    @property
    def any_speed(self) -> float | None:
        """The slowest that was learned; None: nothing was."""
        return min((s.learned for s in self.memory.speeds.values() if s.learned is not None), default=None)

    @property
    def arriving(self) -> float | None:
        """Work per second that requests bring; None: unknown."""
        rate, cost = self.memory.arrival_rate, self.memory.work_per_request
        if rate == 0.0:
            return 0.0
        return None if rate is None or cost is None else rate * cost

    @property
    def backlog(self) -> float | None:
        """Work of all requests that wait, in engines and gateways; None: what one costs is unknown."""
        cost, many = self.memory.work_per_request, self.said.waiting + self.said.held
        if many == 0:
            return 0.0
        return None if cost is None else many * cost

    def backlog_then(self) -> float | None:
        """Work that would still wait after one cold start, with what serves and what is starting; None: unknown."""
        arriving, left = self.arriving, self.backlog
        if arriving is None or left is None or self.any_speed is None:
            return None
        end = self.fleet.cold_start
        changes = sorted({0.0, end} | {s.ready_in for s in self.fleet.placed if s.ready_in < end})
        for start, until in pairwise(changes):
            supply = sum(self.speed(s) for s in self.fleet.placed if s.ready_in <= start)
            left = max(0.0, left + (arriving - supply) * (until - start))
        return left


@dataclass(frozen=True, slots=True)
class Ask:
    """What one rule asks for."""

    rule: str
    up: int | None
    """At least so many now; None: an input is unknown."""
    keep: int | None
    """At least so many must stay, with some room to spare; never below `up`."""
    inputs: Mapping[str, float | int | str | None]
    sentence: str
    fewer: str = ""
    """What would be with one replica less."""
