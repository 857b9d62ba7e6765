"""Replicas of one Model in virtual time, with cold starts, drains and a gateway that holds what nobody can take.

Every policy gets the same fleet: the same gateway (least in flight), the same drain (a replica that goes finishes what
it has), the same cold starts. What differs is when replicas are asked for.
"""

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tests.bench.scaling_engine import Engine, Params, Request

TICK = 1.0
"""Seconds between two looks at a policy."""


@dataclass(slots=True)
class Pod:
    number: int
    asked: float
    ready_at: float
    engine: Engine
    draining: bool = False
    gone: float = math.inf

    def ready(self, now: float) -> bool:
        return self.ready_at <= now


@dataclass(slots=True)
class Fleet:
    """State that policies read. Times in seconds."""

    params: Params
    cold_start: float
    now: float = 0.0
    pods: list[Pod] = field(default_factory=list[Pod])
    held: deque[Request] = field(default_factory=deque[Request])
    arrivals: int = 0
    work_rate: float | None = None
    """Shoal's estimate of one replica."""

    def ready(self) -> list[Pod]:
        return [p for p in self.pods if not p.draining and p.ready(self.now)]

    def standing(self) -> list[Pod]:
        """Asked for and not going."""
        return [p for p in self.pods if not p.draining]

    @property
    def in_flight(self) -> int:
        return sum(p.engine.in_flight for p in self.pods)


class Policy(Protocol):
    """A way to choose replicas. Made anew for each run."""

    @property
    def name(self) -> str: ...

    @property
    def holds(self) -> bool:
        """Requests wait at a gateway while there is no replica; otherwise they are refused."""
        ...

    @property
    def minimum(self) -> int: ...

    def wanted(self, fleet: Fleet, current: int) -> int:
        """Replicas, asked every `TICK`; whoever looks less often says `current` in between."""
        ...


@dataclass(slots=True)
class Result:
    policy: str
    gpu_hours: float
    ttft: list[float]
    """Of the answered ones, from arrival, seconds."""
    flaps: int
    """Changes of direction."""
    asked: int
    """Replicas started."""
    most_waiting: int
    refused: int
    unfinished: int
    steps: list[tuple[float, int]]
    """(time, replicas wanted) at each change."""

    def quantile(self, share: float) -> float:
        if not self.ttft:
            return math.nan
        ranked = sorted(self.ttft)
        return ranked[min(len(ranked) - 1, math.ceil(share * len(ranked)) - 1)]


def replay(
    requests: Sequence[Request],
    policy: Policy,
    params: Params,
    *,
    start: int = 1,
    maximum: int = 16,
    cold_start: float = 60.0,
    seed: int = 0,
    tail: float = 600.0,
    work_rate: float | None = None,
) -> Result:
    """Runs the requests (by arrival, fresh copies) and `tail` seconds more. Cold starts vary by a tenth."""
    draw = random.Random(seed)  # noqa: S311
    fleet = Fleet(params, cold_start, work_rate=work_rate)
    count = 0

    def add(now: float, ready_at: float) -> None:
        nonlocal count
        fleet.pods.append(Pod(count, now, ready_at, Engine(params, clock=now)))
        count += 1

    for _ in range(start):
        add(0.0, 0.0)
    wanted, direction, flaps, refused, most, gpu_seconds = start, 0, 0, 0, 0, 0.0
    started = 0
    steps: list[tuple[float, int]] = [(0.0, wanted)]
    end = requests[-1].arrival + tail
    index, now = 0, 0.0
    while now < end or fleet.in_flight or fleet.held:
        if now > end + 7200:
            break
        for pod in fleet.ready():
            if fleet.held:
                _release(fleet, pod, now)
        while index < len(requests) and requests[index].arrival < now + TICK:
            request = requests[index]
            fleet.now = request.arrival
            fleet.arrivals += 1
            target = _least(fleet, request.arrival)
            if target is not None:
                target.engine.advance(request.arrival)
                target.engine.add(request)
            elif policy.holds:
                fleet.held.append(request)
            else:
                refused += 1
            index += 1
        now += TICK
        fleet.now = now
        for pod in fleet.pods:
            if pod.ready(now):
                pod.engine.advance(now)
        gpu_seconds += TICK * len(fleet.pods)
        fleet.pods = [p for p in fleet.pods if not (p.draining and p.engine.in_flight == 0)]
        most = max(most, len(fleet.held) + sum(len(p.engine.waiting) for p in fleet.pods))
        found = max(policy.minimum, min(maximum, policy.wanted(fleet, wanted)))
        if found != wanted:
            turn = 1 if found > wanted else -1
            flaps += turn != direction and direction != 0
            direction = turn
            steps.append((now, found))
            started += max(0, found - wanted)
            for _ in range(found - len(fleet.standing())):
                add(now, now + cold_start * draw.uniform(0.9, 1.1))
            _drain(fleet, found, now)
            wanted = found
    ttft = [r.first - r.arrival for r in requests if not math.isnan(r.first)]
    unfinished = sum(1 for r in requests if math.isnan(r.done)) - refused
    return Result(policy.name, gpu_seconds / 3600, ttft, flaps, started, most, refused, unfinished, steps)


def _least(fleet: Fleet, now: float) -> Pod | None:
    return min(
        (p for p in fleet.pods if not p.draining and p.ready(now)),
        key=lambda p: (p.engine.in_flight, p.number),
        default=None,
    )


def _release(fleet: Fleet, pod: Pod, now: float) -> None:
    """As much as the replica can run."""
    pod.engine.advance(now)
    while fleet.held and pod.engine.in_flight < pod.engine.params.max_running:
        pod.engine.add(fleet.held.popleft())


def _drain(fleet: Fleet, wanted: int, now: float) -> None:
    """Of those too many the ones that are not ready go first, then those with the least in flight."""
    standing = fleet.standing()
    going = sorted(standing, key=lambda p: (p.ready(now), p.engine.in_flight, -p.number))
    for pod in going[: max(0, len(standing) - wanted)]:
        pod.draining = True
