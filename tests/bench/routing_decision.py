"""CPU of one choice of a replica: the score alone, the choice as a gateway makes it, and the choice with what the
gateway counts and records of it; beside a choice by the fewest requests in flight, in the same run. No I/O."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shoal.api.replica import ReplicaKeys
from shoal.core.routing.choice import Choice
from shoal.core.routing.replica import Replica
from shoal.core.routing.resolve import ServedModel
from shoal.core.routing.reuse import Prompt
from shoal.core.routing.score import ReplicaScores
from shoal.gateway.directory import ClusterSnapshot
from shoal.gateway.prefixes import PrefixShare
from shoal.gateway.replicapool import ReplicaPool
from shoal.net.installkey import KeyRing

REPLICAS = (8, 200)
CALLS = 1000
BETWEEN_REPORTS = 100
ROUNDS = 7
PROMPTS = 160
"""Of 20 marks and 10,000 tokens each; their caches hold all of them."""
MARKS = 20
PLAIN = "by requests in flight"
_MODEL = ServedModel("ns/m", "uid-m", "ns/m", ("m",), None)
_REPORT = ReplicaKeys(
    phase="ready",
    engine_boot="boot",
    running=4,
    waiting=0,
    waiting_tokens=0,
    kv_tokens_used=60_000,
    kv_tokens_total=430_000,
    max_running=256,
)
_MARKS_OF_ALL = MARKS // 2


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    marks: bool = True
    shared: bool = False
    """All replicas have the first half of each prompt."""
    token_characters: int = 4
    new: bool = False
    """No replica has any of the prompt, and its head never came before."""


CASES = (
    Case("without marks", marks=False),
    Case("20 marks, at one replica"),
    Case("20 marks, tokens of 3 characters", token_characters=3),
    Case("20 marks, half of them at all replicas", shared=True),
    Case("20 marks, new", new=True),
)


class Gateway:
    """What of a gateway chooses a replica. Each replica has reported; each prompt was sent to one of them."""

    def __init__(self, replicas: int, case: Case | None) -> None:
        """`case`: None: without scores, as with `PrefixHeads`."""
        self.replicas = tuple(_replica(number) for number in range(replicas))
        self.in_flight = {replica.uid: 1 for replica in self.replicas}
        self.snapshot = ClusterSnapshot(replicas={(_MODEL.key, _MODEL.uid): self.replicas})
        self.scores = None if case is None else ReplicaScores()
        share = None if self.scores is None else PrefixShare(self.scores)
        self.pool = ReplicaPool(
            KeyRing(Path("none")), scores=self.scores, prompt_sent=None if share is None else share.sent
        )
        self._case = case or CASES[0]
        self._made = 0
        self.prompts = self._new_prompts()
        for replica in self.replicas:
            self.pool.enter(replica)
        if self.scores is not None:
            for prompt in self.prompts:
                counted = prompt.tokens * 4 // self._case.token_characters
                self.scores.reuse.trust(_MODEL.uid).counted(prompt.tokens, counted)
        self.report()
        if self.scores is None or case is None:
            return
        for number, prompt in enumerate(self.prompts):
            replica = self.replicas[number % replicas]
            pick = self.pool.cheapest([replica], prompt, alone=True)
            assert pick is not None
            self.pool.enter(replica, pick=pick)
            self.pool.leave(replica)
        if case.shared:
            for replica in self.replicas:
                self.scores.told(replica.uid, self.prompts[0].points[:_MARKS_OF_ALL])
        self.report()

    def report(self) -> None:
        """All agents report: what the calls before have sent is no load any more."""
        for replica in self.replicas:
            self.pool.update(replica.uid, None)
            self.pool.update(replica.uid, _REPORT)

    def score(self, number: int) -> None:
        assert self.scores is not None
        prompt = self.prompts[number % PROMPTS]
        self.scores.pick(self.replicas, self.in_flight, prompt, time.monotonic(), rotation=number)

    def choose(self, number: int) -> Choice:
        found = self.pool.choose(self.snapshot, _MODEL, (), self.prompts[number % PROMPTS])
        assert isinstance(found, Choice)
        return found

    def least_in_flight(self, number: int) -> Choice:
        found = self.pool.choose(self.snapshot, _MODEL, ())
        assert isinstance(found, Choice)
        return found

    def recorded(self, choose: Callable[[int], Choice]) -> Callable[[int], None]:
        """The choice, and what is kept of it until the request has ended."""

        def call(number: int) -> None:
            found = choose(number)
            self.pool.enter(found.replica, pick=found.pick)
            self.pool.leave(found.replica)

        return call

    def microseconds(self, call: Callable[[int], object], warm: Callable[[int], object] | None = None) -> float:
        """CPU of one call. Agents report between some of the calls, so that no queue grows without end. `warm`: called
        after that, so that the homes of heads that came before are known again; not counted. None: `call`."""
        seconds = 0.0
        for first in range(0, CALLS, BETWEEN_REPORTS):
            self.report()
            for number in range(PROMPTS):
                (warm or call)(number)
            if self._case.new:
                self.prompts = self._new_prompts()
            began = time.process_time()
            for number in range(first, first + BETWEEN_REPORTS):
                call(number)
            seconds += time.process_time() - began
        return seconds / CALLS * 1e6

    def _new_prompts(self) -> list[Prompt]:
        self._made += PROMPTS
        return [_prompt(number, self._case) for number in range(self._made - PROMPTS, self._made)]


def _replica(number: int) -> Replica:
    uid = f"2f6c1f0e-0000-4000-8000-{number:012}"
    return Replica(
        uid, "ns", f"pod-{number}", _MODEL.key, _MODEL.uid, "10.0.0.1", True, False, None, "l40s", f"node-{number}"
    )


def _prompt(number: int, case: Case) -> Prompt:
    key = (number + 1) * 0x9E3779B1 & 0x7FFFFFFF
    points = [
        n * 2000 << 32 | ((0x5EED if case.shared and n <= _MARKS_OF_ALL else key) ^ n) for n in range(1, MARKS + 1)
    ]
    return Prompt(MARKS * 500, key, points=points if case.marks else ())


def decisions(replicas: Sequence[int] = REPLICAS) -> None:
    """Prints a row for each number of replicas and each kind of prompt. All take turns, so that other work of the
    machine slows none of them down more than the others."""
    best: dict[tuple[int, str, str], float] = {}
    calls: dict[tuple[int, str, str], Callable[[], float]] = {}
    for count in replicas:
        for name, (gateway, call) in _rows(count).items():
            calls[count, name, "choice"] = partial(gateway.microseconds, call)
            calls[count, name, "recorded"] = partial(gateway.microseconds, gateway.recorded(call), call)
            if gateway.scores is not None:
                calls[count, name, "score"] = partial(gateway.microseconds, gateway.score)
    for _ in range(ROUNDS):
        for key, measure in calls.items():
            best[key] = min(best.get(key, math.inf), measure())
    print(f"CPU of one choice in us, best of {ROUNDS}; in brackets: times that of a choice by requests in flight")
    print("| replicas | prompt | score alone | choice | choice and what is recorded of it |")
    print("|---|---|---|---|---|")
    for count, name in dict.fromkeys((count, name) for count, name, _ in calls):
        score = best.get((count, name, "score"))
        cells = ["" if score is None else f"{score:.1f}"]
        for what in ("choice", "recorded"):
            found, base = best[count, name, what], best[count, PLAIN, what]
            cells.append(f"{found:.1f}" if name == PLAIN else f"{found:.1f} ({found / base:.1f})")
        print(f"| {count} | {name} | {' | '.join(cells)} |", flush=True)


def _rows(count: int) -> dict[str, tuple[Gateway, Callable[[int], Choice]]]:
    plain = Gateway(count, None)
    gateways = {case.name: Gateway(count, case) for case in CASES}
    return {
        PLAIN: (plain, plain.least_in_flight),
        "`PrefixHeads`": (plain, plain.choose),
        **{name: (gateway, gateway.choose) for name, gateway in gateways.items()},
    }
