"""The rules that users pick today, as their documents and code say, and Shoal's own, over the same fleet.

Where a document leaves a figure open, the comment says what was taken.
"""

import math
from collections import deque
from dataclasses import dataclass, field

from shoal.core.scaling import (
    Demand,
    Load,
    ModelSnapshot,
    Policy,
    Replica,
    ScalingMemory,
    ScalingVariant,
    SignalSource,
    decide,
)
from tests.bench.scaling_fleet import Fleet

SCRAPE_SECONDS = 15.0
"""Of Prometheus, where a rule reads its metrics there."""


# --- the horizontal pod autoscaler -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Hpa:
    """Sync every 15 s; desired = ceil(current x metric / target), tolerance 0.1; up by max(100 %, 4 pods) per 15 s
    without stabilisation, down to the highest recommendation of 300 s."""

    down_seconds: float = 300.0
    up_seconds: float = 0.0
    sync: float = 15.0
    tolerance: float = 0.1
    _next: float = 0.0
    _said: deque[tuple[float, int]] = field(default_factory=deque[tuple[float, int]])

    def choose(self, now: float, current: int, ratios: list[float]) -> int:
        """`ratios`: of each metric, desired over current replicas."""
        if now < self._next:
            return current
        self._next = now + self.sync
        desired = max(
            (current if abs(r - 1) <= self.tolerance else math.ceil(current * r - 1e-9) for r in ratios),
            default=current,
        )
        self._said.append((now, desired))
        horizon = max(self.down_seconds, self.up_seconds)
        while self._said[0][0] < now - horizon:
            self._said.popleft()
        highest = max(n for at, n in self._said if at >= now - self.down_seconds)
        lowest = min(n for at, n in self._said if at >= now - self.up_seconds)
        if lowest > current:
            return min(lowest, current + max(current, 4))
        return highest if highest < current else current


@dataclass(slots=True)
class Scraped:
    """Sums over ready replicas as Prometheus has them."""

    at: float = -math.inf
    waiting: float = 0.0
    kv: float = 0.0
    """Sum of the replicas' shares of KV cache in use."""
    ready: int = 0

    def look(self, fleet: Fleet) -> None:
        if fleet.now >= self.at + SCRAPE_SECONDS:
            ready = fleet.ready()
            self.at, self.ready = fleet.now, len(ready)
            self.waiting = sum(len(p.engine.waiting) for p in ready)
            self.kv = sum(p.engine.kv_used / fleet.params.kv_tokens for p in ready)


@dataclass(slots=True)
class HpaOnQueue:
    """HPA on the engines' queue depth through a metrics adapter; pods that are not ready count with 0."""

    target: float = 4.0
    name: str = "HPA, queue depth"
    holds: bool = False
    minimum: int = 1
    _hpa: Hpa = field(default_factory=Hpa)
    _metrics: Scraped = field(default_factory=Scraped)

    def wanted(self, fleet: Fleet, current: int) -> int:
        self._metrics.look(fleet)
        return self._hpa.choose(fleet.now, current, [self._metrics.waiting / (self.target * max(1, current))])


@dataclass(slots=True)
class Keda:
    """ScaledObject with two Prometheus triggers, average KV use and average queue (llm-d's benchmark: 0.7 and 2): HPA
    between 1 and n; 0 to 1 by a poll every 30 s, 1 to 0 after 300 s without an active trigger."""

    kv_target: float = 0.7
    queue_target: float = 2.0
    name: str = "KEDA, KV use and queue"
    holds: bool = False
    minimum: int = 1
    _hpa: Hpa = field(default_factory=Hpa)
    _metrics: Scraped = field(default_factory=Scraped)
    _poll: float = 0.0
    _active: float = 0.0

    def wanted(self, fleet: Fleet, current: int) -> int:
        m = self._metrics
        m.look(fleet)
        if fleet.now >= self._poll:
            self._poll = fleet.now + 30.0
            if m.waiting > 0 or m.kv > 0:
                self._active = fleet.now
            elif self.minimum == 0 and fleet.now - self._active >= 300.0:
                return 0  # from any number: activation does not go through the HPA
        if current == 0:
            return 0  # nothing is measured where nothing runs
        there = max(1, current)
        return self._hpa.choose(
            fleet.now, current, [m.kv / (self.kv_target * there), m.waiting / (self.queue_target * there)]
        )


# --- concurrency -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Kpa:
    """Knative: concurrency 100 x 70 %, stable window 60 s, panic window 6 s at 200 %, tick 2 s, at most halved at a
    time."""

    target: float = 100.0
    name: str = "KPA, concurrency 100"
    holds: bool = True
    minimum: int = 1
    _seen: deque[tuple[float, float]] = field(default_factory=deque[tuple[float, float]])
    _panic: float = -math.inf
    _most: int = 0
    _next: float = 0.0

    def wanted(self, fleet: Fleet, current: int) -> int:
        now = fleet.now
        self._seen.append((now, fleet.in_flight + len(fleet.held)))
        while self._seen[0][0] < now - 60.0:
            self._seen.popleft()
        if now < self._next:
            return current
        self._next = now + 2.0
        per_pod = 0.7 * self.target
        ready = max(1, len(fleet.ready()))
        stable = math.ceil(_mean(self._seen, now - 60.0) / per_pod)
        panic = math.ceil(_mean(self._seen, now - 6.0) / per_pod)
        if panic / ready >= 2.0:
            self._panic = now
        if now - self._panic < 60.0:
            self._most = max(self._most, panic, current)
            return self._most
        self._most = 0
        return max(stable, math.floor(ready / 2))


def _mean(seen: deque[tuple[float, float]], since: float) -> float:
    some = [value for at, value in seen if at > since]
    return sum(some) / len(some) if some else 0.0


# --- serving operators -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Apa:
    """AIBrix APA on KV use: over 1.1 of the target ceil(n use / target), at most 2 n; under 0.9 of it down, at least
    n / 2, with a cooldown of 300 s. Target 0.5 and a look every 10 s: the examples of its documents."""

    target: float = 0.5
    name: str = "AIBrix APA, KV use"
    holds: bool = False
    minimum: int = 1
    _next: float = 0.0
    _highest: deque[tuple[float, int]] = field(default_factory=deque[tuple[float, int]])

    def wanted(self, fleet: Fleet, current: int) -> int:
        if fleet.now < self._next:
            return current
        self._next = fleet.now + 10.0
        ready = fleet.ready()
        if not ready:
            return current
        use = sum(p.engine.kv_used / fleet.params.kv_tokens for p in ready) / len(ready)
        found = current
        if use / self.target > 1.1:
            found = min(2 * current, math.ceil(current * use / self.target))
        elif use / self.target < 0.9:
            found = max(math.floor(current / 2), math.ceil(current * use / self.target), 1)
        self._highest.append((fleet.now, found))
        while self._highest[0][0] < fleet.now - 300.0:
            self._highest.popleft()
        return found if found >= current else min(current, max(n for _, n in self._highest))


@dataclass(slots=True)
class WvaV1:
    """llm-d's saturation analyser until v0.8: a replica is saturated at KV use 0.8 or 5 queued; one more when the mean
    spare is below 0.1 or 3; one less when the rest would keep both; none while one is starting. Every 60 s, maxima of
    a minute, behind an HPA with 240 s of stabilisation both ways, as its documents suggest."""

    kv_saturated: float = 0.8
    stabilization: float = 240.0
    name: str = "llm-d WVA V1"
    holds: bool = False
    minimum: int = 1
    _next: float = 0.0
    _seen: deque[tuple[float, dict[int, tuple[float, int]]]] = field(
        default_factory=deque[tuple[float, dict[int, tuple[float, int]]]]
    )
    _hpa: Hpa = field(default_factory=Hpa)
    _desired: int = 1

    def __post_init__(self) -> None:
        self._hpa = Hpa(down_seconds=self.stabilization, up_seconds=self.stabilization, tolerance=0.0)

    def wanted(self, fleet: Fleet, current: int) -> int:
        now = fleet.now
        if not self._seen or now - self._seen[-1][0] >= SCRAPE_SECONDS:
            kv = fleet.params.kv_tokens
            self._seen.append((now, {p.number: (p.engine.kv_used / kv, len(p.engine.waiting)) for p in fleet.ready()}))
            while self._seen[0][0] < now - 60.0:
                self._seen.popleft()
        if now >= self._next:
            self._next = now + 60.0
            self._desired = self._analyse(fleet, current)
        return self._hpa.choose(now, current, [self._desired / max(1, current)])

    def _analyse(self, fleet: Fleet, current: int) -> int:
        ready = [p.number for p in fleet.ready()]
        if not ready:
            return current
        if len(ready) < len(fleet.standing()):
            return current
        use = {n: max((s[n][0] for _, s in self._seen if n in s), default=0.0) for n in ready}
        queued = {n: max((s[n][1] for _, s in self._seen if n in s), default=0) for n in ready}
        free = [n for n in ready if use[n] < self.kv_saturated and queued[n] < 5]
        if not free:
            return current + 1
        if (
            sum(self.kv_saturated - use[n] for n in free) / len(free) < 0.1
            or sum(5 - queued[n] for n in free) / len(free) < 3
        ):
            return current + 1
        rest = len(ready) - 1
        if rest < 1:
            return current
        if self.kv_saturated - sum(use.values()) / rest >= 0.1 and 5 - sum(queued.values()) / rest >= 3:
            return current - 1
        return current


# --- Shoal -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Shoal:
    """The operator's own decider, asked every second; its streams are that young."""

    policy: Policy = field(default_factory=lambda: Policy(minimum=1, maximum=16))
    name: str = "Shoal"
    holds: bool = True
    memory: ScalingMemory | None = None
    reasons: list[str] = field(default_factory=list[str])

    @property
    def minimum(self) -> int:
        return self.policy.minimum

    def wanted(self, fleet: Fleet, current: int) -> int:
        seen = snapshot_of(fleet, self.policy, current)
        decision, self.memory = decide(seen, self.memory, fleet.now)
        if decision.wanted != current:
            self.reasons.append(
                f"{fleet.now:.0f} s: {current} -> {decision.wanted} {decision.reason}: {decision.message}"
            )
        return decision.wanted


def snapshot_of(fleet: Fleet, policy: Policy, wanted: int) -> ModelSnapshot:
    """What agents and one gateway would say."""
    replicas: list[Replica] = []
    for pod in fleet.pods:
        e, ready = pod.engine, pod.ready(fleet.now)
        said = Load(
            engine_boot=str(pod.number),
            phase="ready",
            running=e.running,
            max_running=e.params.max_running,
            waiting=len(e.waiting),
            waiting_tokens=e.waiting_tokens,
            kv_tokens_used=e.kv_used,
            kv_tokens_total=e.params.kv_tokens,
            prompt_tokens_total=e.prompt_tokens,
            generation_tokens_total=e.generated_tokens,
        )
        replicas.append(
            Replica(
                uid=str(pod.number),
                pod=f"pod-{pod.number}",
                gpu_class="l40s-48gb",
                ready=ready,
                was_ready=ready,
                deleting=pod.draining,
                lost=False,
                created=pod.asked,
                load=said if ready else None,
            )
        )
    demand = Demand(
        arrivals=fleet.arrivals,
        in_flight=fleet.in_flight,
        held=len(fleet.held),
        held_tokens=sum(r.prompt + r.answer for r in fleet.held),
        oldest_seconds=fleet.now - fleet.held[0].arrival if fleet.held else 0.0,
    )
    here = ScalingVariant(
        "l40s-48gb",
        replicas=len(fleet.standing()),
        headroom=None,
        kv_tokens=fleet.params.kv_tokens,
        cold_start_seconds=fleet.cold_start,
        least_work_rate=fleet.work_rate,
    )
    return ModelSnapshot(
        policy, wanted, tuple(replicas), (SignalSource("gateway", "boot", demand),), (here,), False, 0.0
    )
