"""The same minutes of a Model give the same decisions as before: how many replicas, why, and when to look again."""

import hashlib
import random
from collections.abc import Iterator
from typing import Final

from shoal.core.scaling import Load, ModelSnapshot, Policy, Replica, ScalingMemory, SignalSource, decide
from tests.golden.recorded import compare
from tests.support.scaling import CLASS, KV_TOKENS, load, pending, replica, source, variant

STEPS: Final = 40
READABLE: Final = 40
DIGESTS: Final = 300


class Minutes:
    """A Model with some load, whose replicas start some steps after they are wanted."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)  # noqa: S311 - the same each time
        self.policy = Policy(
            minimum=dice.choice((0, 0, 1, 2)),
            maximum=dice.randint(2, 12),
            kv_percent=dice.choice((50, 80, 100)),
            queued_per_replica=dice.randint(1, 8),
            idle_seconds=dice.choice((30.0, 600.0)),
            stabilization_seconds=dice.choice((0.0, 20.0, 120.0)),
        )
        self.now = 0.0
        self.wanted = dice.randint(0, 3)
        self.pods: dict[int, float] = dict.fromkeys(range(self.wanted), -1000.0)
        """Number -> when it was made."""
        self.made = self.wanted
        self.arrivals = self.prompt = self.generated = 0
        self.busy = 0

    def load(self) -> Load:
        dice, busy = self.dice, self.busy
        waiting = dice.choice((0, 0, 1, 9, 40)) if busy > 1 else 0
        return load(
            running=dice.randint(0, 25 * busy),
            waiting=waiting,
            waiting_tokens=waiting * 500,
            kv_tokens_used=min(KV_TOKENS, dice.randint(0, KV_TOKENS // 3) * busy),
            prompt_tokens_total=self.prompt,
            generation_tokens_total=self.generated,
        )

    def replicas(self) -> tuple[Replica, ...]:
        found: list[Replica] = []
        for number, made in sorted(self.pods.items()):
            if self.now - made < 60:
                found.append(pending(number, created=made))
            else:
                dark = self.dice.random() < 0.05
                found.append(replica(number, self.load(), created=made, dark=dark))
        return tuple(found)

    def gateways(self) -> tuple[SignalSource, ...]:
        held = 0 if any(self.now - made >= 60 for made in self.pods.values()) else self.dice.randint(0, 3 * self.busy)
        dark = self.dice.random() < 0.05
        return (
            source(
                dark=dark,
                arrivals=self.arrivals,
                in_flight=self.dice.randint(0, 10 * self.busy),
                held=held,
                held_tokens=held * 500,
                oldest_seconds=5.0 if held else 0.0,
            ),
            source("gateway-1", arrivals=self.arrivals),
        )

    def snapshot(self) -> ModelSnapshot:
        return ModelSnapshot(
            policy=self.policy,
            wanted=self.wanted,
            replicas=self.replicas(),
            sources=self.gateways(),
            variants=(variant(CLASS, replicas=len(self.pods), room=self.dice.choice((None, 0, 3, 100))),),
            rolling=self.dice.random() < 0.05,
            term_began=0.0,
        )

    def pass_time(self, wanted: int) -> None:
        dice = self.dice
        self.wanted = wanted
        while len(self.pods) > wanted:
            self.pods.pop(max(self.pods))
        while len(self.pods) < wanted:
            self.pods[self.made] = self.now
            self.made += 1
        if dice.random() < 0.15:
            self.busy = dice.choice((0, 0, 1, 2, 3))
        self.arrivals += dice.randint(0, 20) * self.busy
        self.prompt += 3000 * self.busy
        self.generated += 500 * self.busy
        self.now += dice.choice((1.0, 5.0, 15.0, 60.0))


def decisions(seed: int) -> Iterator[str]:
    it = Minutes(seed)
    memory: ScalingMemory | None = None
    for _ in range(STEPS):
        decision, memory = decide(it.snapshot(), memory, it.now)
        again = "never" if decision.recheck_seconds is None else f"{decision.recheck_seconds:.3f}"
        deciding = f"{decision.rules[0].name} {decision.rules[0].replicas}" if decision.rules else "no rule"
        change = f"{decision.before} -> {decision.wanted} {decision.reason}"
        yield f"model {seed} at {it.now:g}: {change} {deciding} again {again}"
        it.pass_time(decision.wanted)


def test_each_model_gets_the_decisions_that_it_got_before() -> None:
    compare("decisions.txt", "".join(f"{each}\n" for seed in range(READABLE) for each in decisions(seed)))


def test_many_more_models_get_the_same_decisions() -> None:
    digests = (
        hashlib.sha256("\n".join(decisions(seed)).encode()).hexdigest()[:16] for seed in range(READABLE, DIGESTS)
    )
    compare("decision-digests.txt", "".join(f"{READABLE + at} {each}\n" for at, each in enumerate(digests)))
