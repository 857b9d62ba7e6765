"""A Model under load in virtual time, simple enough to know what it needs: each replica serves so many requests per
second and no more, and holds so many KV tokens for each that it serves."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

from shoal.core.scaling import ModelSnapshot, Policy, Replica, ScalingMemory, decide
from tests.support.scaling import KV_TOKENS, load, pending, replica, snapshot, source

TOKENS = 1000
"""Of a request: its prompt; answers are as good as free here."""


@dataclass(slots=True)
class World:
    """`rate` requests per second at a time; `speed` of one replica; each request takes `seconds` without a queue."""

    rate: Callable[[float], float]
    speed: float = 2.0
    seconds: float = 5.0
    cold_start: float = 60.0
    policy: Policy = field(default_factory=Policy)
    now: float = 0.0
    wanted: int = 1
    memory: ScalingMemory | None = None
    arrived: float = 0.0
    queue: float = 0.0
    history: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """(time, replicas wanted) at each decision."""
    ready: list[float] = field(default_factory=lambda: [0.0])
    """When each replica serves."""
    served: dict[int, float] = field(default_factory=lambda: {0: 0.0})
    """Requests by replica."""

    def run(self, seconds: float, step: float = 1.0) -> None:
        """Load changes and decisions, every `step`."""
        end = self.now + seconds
        while self.now < end:
            self._serve(step)
            self._decide()

    def _serve(self, step: float) -> None:
        came = self.rate(self.now) * step
        self.now += step
        self.arrived += came
        serving = [i for i, at in enumerate(self.ready) if at <= self.now]
        able = min(self.queue + came, self.speed * step * len(serving))
        self.queue += came - able
        for i in serving:
            self.served[i] = self.served.get(i, 0.0) + able / len(serving)

    def seen(self) -> ModelSnapshot:
        """What agents and the gateway say."""
        serving = [i for i, at in enumerate(self.ready) if at <= self.now]
        rate = min(self.rate(self.now), self.speed * len(serving))
        share = max(1, len(serving))
        waiting = math.floor(self.queue) if serving else 0
        found: list[Replica] = []
        for i, at in enumerate(self.ready):
            if at > self.now:
                found.append(pending(i, created=at - self.cold_start))
                continue
            queued = waiting // share + (i < waiting % share)
            running = math.ceil(rate / share * self.seconds)
            done = math.floor(self.served[i])
            found.append(
                replica(
                    i,
                    load(
                        running=running,
                        waiting=queued,
                        waiting_tokens=queued * TOKENS,
                        kv_tokens_used=min(KV_TOKENS, running * TOKENS),
                        prompt_tokens_total=done * TOKENS,
                    ),
                )
            )
        running = sum(r.load.running or 0 for r in found if r.load)
        held = 0 if serving else math.floor(self.queue)
        gateway = source(
            arrivals=math.floor(self.arrived), in_flight=running + waiting, held=held, held_tokens=held * TOKENS
        )
        seen = snapshot(*found, sources=[gateway], policy=self.policy, wanted=self.wanted)
        return replace(seen, variants=(replace(seen.variants[0], cold_start_seconds=self.cold_start),))

    def _decide(self) -> None:
        decision, self.memory = decide(self.seen(), self.memory, self.now)
        self.wanted = decision.wanted
        self.history.append((self.now, self.wanted))
        for _ in range(self.wanted - len(self.ready)):
            self.served[len(self.ready)] = 0.0
            self.ready.append(self.now + self.cold_start)
        if self.wanted < len(self.ready):
            self.ready.sort()  # those that are not ready yet go first
            del self.ready[self.wanted :]

    def changes(self, since: float) -> list[tuple[float, int]]:
        """Decisions after `since` that differ from the one before."""
        later = [h for h in self.history if h[0] >= since]
        return [b for a, b in pairwise(later) if a[1] != b[1]]
