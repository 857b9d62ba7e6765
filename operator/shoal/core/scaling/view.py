"""Input of the rules: one Model at one moment, with what was learned before."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from shoal.core.scaling.fleet import FleetCapacity, Slot
from shoal.core.scaling.load import FleetLoad
from shoal.core.scaling.types import ModelSnapshot, ScalingMemory, Speed


@dataclass(frozen=True, slots=True)
class View:
    snapshot: ModelSnapshot
    load: FleetLoad
    fleet: FleetCapacity
    memory: ScalingMemory
    now: float

    @property
    def placed(self) -> int:
        return len(self.fleet.placed)

    @property
    def span(self) -> float:
        """Seconds for which fewer must have been enough."""
        return self.memory.stabilization_factor * self.snapshot.policy.stabilization_seconds

    def tokens(self, slot: Slot) -> float:
        """KV tokens that a replica may fill: its target share."""
        return (slot.kv_tokens or 0) * self.snapshot.policy.kv_percent / 100 if slot.serves else 0.0

    def speed(self, slot: Slot) -> float:
        """Work per second at the limit: learned in this term, else in earlier ones, else the slowest of all classes."""
        return (self._limit(slot.gpu_class) or self.any_speed or 0.0) if slot.serves else 0.0

    def _limit(self, gpu_class: str) -> float | None:
        speed = self.memory.speeds.get(gpu_class)
        if speed is not None and speed.learned is not None:
            return speed.learned
        return self.fleet.work_rates.get(gpu_class)

    def speed_at_least(self, slot: Slot) -> float:
        """Work per second that a replica surely does: learned, else seen without a queue or estimated."""
        if not slot.serves:
            return 0.0
        seen = self.memory.speeds.get(slot.gpu_class, Speed()).proven
        return self._limit(slot.gpu_class) or max(seen, self.fleet.least_work_rates.get(slot.gpu_class, 0.0))

    @property
    def any_speed(self) -> float | None:
        """The slowest known limit; None: none is known."""
        classes = {*self.memory.speeds, *self.fleet.work_rates}
        return min((limit for name in classes if (limit := self._limit(name)) is not None), default=None)

    @property
    def arriving(self) -> float | None:
        """Work per second of arriving requests; None: unknown."""
        return self._work(self.memory.arrival_rate)

    @property
    def arriving_now(self) -> float | None:
        """`arriving`, over the last few seconds."""
        return self._work(self.memory.arrival_rate_now)

    def _work(self, requests: float | None) -> float | None:
        cost = self.memory.work_per_request
        if requests == 0.0:
            return 0.0
        return None if requests is None or cost is None else requests * cost

    def backlog_then(self, speed: Callable[[Slot], float]) -> float | None:
        """Work that would still wait after one cold start, with ready and starting replicas and requests coming as in
        the last few seconds; None: unknown."""
        arriving, left = self.arriving_now, self._work(float(self.load.waiting + self.load.held))
        if arriving is None or left is None:
            return None
        end = self.fleet.cold_start
        changes = sorted({0.0, end} | {s.ready_in for s in self.fleet.placed if s.ready_in < end})
        for start, until in pairwise(changes):
            supply = sum(speed(s) for s in self.fleet.placed if s.ready_in <= start)
            left = max(0.0, left + (arriving - supply) * (until - start))
        return left

    def sufficient(self, speed: Callable[[Slot], float]) -> int | None:
        """Replicas that take what arrives and clear, within one cold start, what will wait after one; None: unknown."""
        then, arriving = self.backlog_then(speed), self.arriving_now
        if then is None or arriving is None:
            return None
        share = self.snapshot.policy.rate_percent / 100
        return self.fleet.needed(arriving / share + then / self.fleet.cold_start, speed)


@dataclass(frozen=True, slots=True)
class RuleOutput:
    """The result of one rule."""

    rule: str
    up: int | None
    """Replicas needed now, at least; None: an input is unknown."""
    keep: int | None
    """Replicas that must stay, at least, with some reserve; never below `up`."""
    inputs: Mapping[str, float | int | str | None]
    sentence: str
    fewer: str = ""
    """The effect of one replica less, as a sentence."""
