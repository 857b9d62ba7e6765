"""Routing rules that the replay compares. Each gateway has its own instance and knows only what a gateway knows; only
`Ideal` sees into the engines."""

import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.api.replica import ReplicaKeys
from shoal.core.lora.placement.rendezvous import best
from shoal.core.routing import choice
from shoal.core.routing.adapterchoice import AdapterCandidate, AdapterChoice, choose_for_adapter
from shoal.core.routing.affinity import favourite
from shoal.core.routing.prefixes import Points
from shoal.core.routing.reuse import Prompt
from shoal.core.routing.score import Pick, ReplicaScores
from tests.bench.routing_engine import LOAD_SECONDS, Asked, Replica, Running


@dataclass(frozen=True, slots=True)
class Report:
    """What an agent's stream tells all gateways of one replica."""

    at: float
    running: int
    waiting: int
    waiting_tokens: int
    kv_used: int
    kv_total: int
    max_running: int
    throughput: float
    """Generated tokens per second since the last report."""
    adapters: frozenset[int]


class Rule(Protocol):
    def reported(self, uid: str, report: Report) -> None: ...
    def choose(self, asked: Asked, replicas: Sequence[Replica], now: float) -> Replica: ...
    def sent(self, asked: Asked, replica: Replica, now: float) -> None: ...
    def began(self, one: Running, replica: Replica) -> None: ...
    def ended(self, one: Running, replica: Replica) -> None: ...
    def heard(self, replica: Replica, now: float) -> None:
        """The events of the replica's prefix cache may be read."""
        ...


def uid_of(replica: Replica) -> str:
    return f"2f6c1f0e-0000-4000-8000-{replica.number:012}"


class Base:
    """Counts what this gateway has in flight."""

    def __init__(self, gateway: int, gateways: int) -> None:
        self.gateway = gateway
        self.turn = gateway
        self.in_flight: dict[str, int] = {}
        self.reports: dict[str, Report] = {}
        self.dice = random.Random(100 + gateway)  # noqa: S311

    def reported(self, uid: str, report: Report) -> None:
        self.reports[uid] = report

    def sent(self, asked: Asked, replica: Replica, now: float) -> None:
        uid = uid_of(replica)
        self.in_flight[uid] = self.in_flight.get(uid, 0) + 1

    def began(self, one: Running, replica: Replica) -> None: ...

    def heard(self, replica: Replica, now: float) -> None: ...

    def ended(self, one: Running, replica: Replica) -> None:
        self.in_flight[uid_of(replica)] -= 1


class RoundRobin(Base):
    def choose(self, asked: Asked, replicas: Sequence[Replica], now: float) -> Replica:
        self.turn += 1
        return replicas[self.turn % len(replicas)]


class LeastInFlight(Base):
    def choose(self, asked: Asked, replicas: Sequence[Replica], now: float) -> Replica:
        return min(replicas, key=lambda r: (self.in_flight.get(uid_of(r), 0), self.dice.random()))


class Before(Base):
    """Shoal without the score: the head's replica within its share of this gateway's load. Adapters: a replica that has
    it, else its home."""

    def choose(self, asked: Asked, replicas: Sequence[Replica], now: float) -> Replica:
        among = self.able(asked, replicas)
        uids = [uid_of(r) for r in among]
        loads = [self.in_flight.get(uid, 0) for uid in uids]
        if asked.head is None:
            fewest = min(loads)
            equals = [r for r, load in zip(among, loads, strict=True) if load == fewest]
            self.turn += 1
            return equals[self.turn % len(equals)]
        return favourite(asked.head, among, uids, loads)

    def able(self, asked: Asked, replicas: Sequence[Replica]) -> list[Replica]:
        """The replicas among which the prompt decides: all, or those that have the adapter and capacity, else the
        adapter's home."""
        if asked.adapter is None:
            return list(replicas)
        adapter = asked.adapter
        having = [r for r in replicas if self.has(uid_of(r), adapter)]
        if free := [r for r in having if self.has_capacity(r)]:
            return free
        rest = [r for r in replicas if r not in having and self.has_capacity(r)] or having or list(replicas)
        home = best(f"ns/adapter-{adapter}", [uid_of(r) for r in rest])
        return [r for r in rest if uid_of(r) == home]

    def has(self, uid: str, adapter: int) -> bool:
        known = self.reports.get(uid)
        return known is not None and adapter in known.adapters

    def has_capacity(self, replica: Replica) -> bool:
        known = self.reports.get(uid_of(replica))
        return known is None or (
            known.running + known.waiting < known.max_running
            and known.kv_used + known.waiting_tokens < 0.8 * known.kv_total
        )


class LeastLoad(Base):
    """A model of smg's `least_load`: (waiting tokens without cached ones + tokens sent since the report) / generated
    tokens per second + 0.15 s k / (1 - k). It knows the exact length of each prompt, as smg does over gRPC, and gets
    each report as soon as Shoal does (smg polls every 10 s)."""

    def __init__(self, gateway: int, gateways: int) -> None:
        super().__init__(gateway, gateways)
        self.since: dict[str, int] = {}

    def reported(self, uid: str, report: Report) -> None:
        super().reported(uid, report)
        self.since[uid] = 0

    def sent(self, asked: Asked, replica: Replica, now: float) -> None:
        super().sent(asked, replica, now)
        self.since[uid_of(replica)] = self.since.get(uid_of(replica), 0) + asked.prompt

    def choose(self, asked: Asked, replicas: Sequence[Replica], now: float) -> Replica:
        return self.least(replicas)

    def least(self, replicas: Sequence[Replica]) -> Replica:
        return min(replicas, key=lambda r: (self.expected(uid_of(r)), self.dice.random()))

    def expected(self, uid: str) -> float:
        known = self.reports.get(uid)
        if known is None:
            scores = [self.expected(other) for other in self.reports]
            return min(scores, default=0.0) + self.in_flight.get(uid, 0) * 1024 / 2000
        k = min(0.999, known.kv_used / known.kv_total)
        rate = known.throughput or 2000.0
        return (known.waiting_tokens + self.since.get(uid, 0)) / rate + 0.15 * k / (1 - k)


class CacheAware(LeastLoad):
    """A model of smg's `cache_aware`: the replica to which most of the prompt was sent before, if that is more than 0.3
    of it; else, and while requests in flight differ by more than 64 and by 1.5 times, `least_load`. Each router has a
    tree of what it sent itself; here of blocks, of 4 times what the replicas' caches hold."""

    def __init__(self, gateway: int, gateways: int) -> None:
        super().__init__(gateway, gateways)
        self.tree: OrderedDict[int, set[str]] = OrderedDict()

    def choose(self, asked: Asked, replicas: Sequence[Replica], now: float) -> Replica:
        loads = [self.in_flight.get(uid_of(r), 0) for r in replicas]
        if max(loads) - min(loads) > 64 and max(loads) > 1.5 * min(loads):
            return self.least(replicas)
        by_uid = {uid_of(r): r for r in replicas}
        holders, matched = set(by_uid), 0
        for name, tokens in asked.blocks:
            now_having = holders & self.tree.get(_salted(name, asked), set())
            if not now_having:
                break
            holders, matched = now_having, matched + tokens
        if matched > 0.3 * asked.prompt:
            return self.least([by_uid[uid] for uid in sorted(holders)])
        return self.least(replicas)

    def sent(self, asked: Asked, replica: Replica, now: float) -> None:
        super().sent(asked, replica, now)
        for name, _ in (*asked.blocks,):
            key = _salted(name, asked)
            self.tree.setdefault(key, set()).add(uid_of(replica))
            self.tree.move_to_end(key)
        while len(self.tree) > 1 << 16:
            self.tree.popitem(last=False)


def _salted(name: int, asked: Asked) -> int:
    return name if asked.adapter is None else hash((name, asked.adapter))


class Scored(Base):
    """The fewest predicted seconds (`core/routing/score.py`), with knowledge of heads alone, and the rule before while
    nothing is known."""

    def __init__(self, gateway: int, gateways: int) -> None:
        super().__init__(gateway, gateways)
        self.scores = ReplicaScores()
        self.before = Before(gateway, gateways)
        self.before.in_flight, self.before.reports = self.in_flight, self.reports
        self.pods: dict[str, choice.Replica] = {}
        self.picked: dict[int, Pick | float] = {}
        self.pick: Pick | None = None

    def reported(self, uid: str, report: Report) -> None:
        super().reported(uid, report)
        keys = ReplicaKeys.model_construct(
            running=report.running,
            waiting=report.waiting,
            waiting_tokens=report.waiting_tokens,
            kv_tokens_used=report.kv_used,
            kv_tokens_total=report.kv_total,
            max_running=report.max_running,
            engine_boot="boot",
        )
        self.scores.reported(uid, keys, self.in_flight.get(uid, 0), report.at)

    def choose(self, asked: Asked, replicas: Sequence[Replica], now: float) -> Replica:
        self.turn += 1
        if asked.adapter is not None:
            return self._for_adapter(asked, asked.adapter, replicas, now)
        points = self.points(asked)
        prompt = Prompt(asked.prompt, asked.head, asked.repeated, asked.system, asked.system_tokens, points)
        pods = [self._pod(r) for r in replicas]
        held = self.held(asked, now)
        self.pick = self.scores.pick(pods, self.in_flight, prompt, now, rotation=self.turn, held=held)
        if self.pick is None:
            return self.before.choose(asked, replicas, now)
        uid = self.pick.replica.uid
        return next(r for r in replicas if uid_of(r) == uid)

    def points(self, asked: Asked) -> Points:
        """What is known of a prompt besides its head."""
        return ()

    def held(self, asked: Asked, now: float) -> Mapping[str, int] | None:
        """Tokens of the prompt that replicas are known to hold, by uid."""
        return None

    def _for_adapter(self, asked: Asked, adapter: int, replicas: Sequence[Replica], now: float) -> Replica:
        salt = hash((7, adapter))
        system = None if asked.system is None else asked.system ^ salt
        points = self.points(asked)
        prompt = Prompt(asked.prompt, asked.head, asked.repeated, system, asked.system_tokens, points)

        def candidate(replica: Replica) -> AdapterCandidate:
            uid = uid_of(replica)
            has, free = self.before.has(uid, adapter), self.before.has_capacity(replica)
            return AdapterCandidate(self._pod(replica), has, has, True, free, self.in_flight.get(uid, 0))

        def cheapest(pods: Sequence[choice.Replica], waits: Mapping[str, float] | None) -> Pick | None:
            home = best(f"ns/adapter-{adapter}", [p.uid for p in pods])
            turn, held = self.turn, self.held(asked, now)
            return self.scores.pick(
                pods, self.in_flight, prompt, now, rotation=turn, waits=waits, home=home, alone=True, held=held
            )

        def prefer(pods: Sequence[choice.Replica]) -> choice.Replica:
            home = best(f"ns/adapter-{adapter}", [p.uid for p in pods])
            return next(p for p in pods if p.uid == home)

        known = [candidate(r) for r in replicas]
        found = choose_for_adapter(
            [c for c in known if c.loaded],
            lambda: [c for c in known if not c.loaded],
            prefer,
            self.turn,
            asked.head,
            cheapest,
            LOAD_SECONDS,
        )
        assert isinstance(found, AdapterChoice)
        self.pick = found.pick
        return next(r for r in replicas if uid_of(r) == found.replica.uid)

    def sent(self, asked: Asked, replica: Replica, now: float) -> None:
        super().sent(asked, replica, now)
        if self.pick is not None:
            self.scores.sent(self.pick)
        self.picked[asked.number] = now if self.pick is None else self.pick

    def began(self, one: Running, replica: Replica) -> None:
        if one.asked is not None and isinstance(pick := self.picked[one.asked.number], Pick):
            self.scores.began(pick, one.first)

    def ended(self, one: Running, replica: Replica) -> None:
        super().ended(one, replica)
        if one.asked is None:
            return
        pick = self.picked.pop(one.asked.number)
        if isinstance(pick, Pick):
            self.scores.answered(
                pick, first=one.first, prompt=one.prompt, cached=one.cached, answer=one.answer, ended=one.done
            )
        else:
            pod, seconds = self._pod(replica), one.first - pick
            self.scores.observe(pod, prompt=one.prompt, cached=one.cached, seconds=seconds, now=one.first)

    def _pod(self, replica: Replica) -> choice.Replica:
        uid = uid_of(replica)
        found = self.pods.get(uid)
        if found is None:
            found = self.pods[uid] = choice.Replica(
                uid, "ns", f"pod-{replica.number}", "ns/m", "m", "10.0.0.1", True, False, None, replica.gpu_class, None
            )
        return found


class Ideal(Base):
    """Sees each engine's cache and queue as they are, and knows its speed: the fewest seconds until the first token."""

    def choose(self, asked: Asked, replicas: Sequence[Replica], now: float) -> Replica:
        return min(replicas, key=lambda r: self._cost(asked, r, now))

    def _cost(self, asked: Asked, replica: Replica, now: float) -> float:
        p = replica.params
        uncached = asked.prompt - replica.found(asked.blocks)
        others = replica.all_in_flight
        per_token = (p.t1 + p.kp * asked.prompt / 2) / 1e3
        load = 0.0
        if asked.adapter is not None and asked.adapter not in replica.adapters:
            load = LOAD_SECONDS + max(0.0, replica.load_free - now)
        over = max(0, others + 1 - p.max_running)
        full = max(0, replica.reserved + asked.prompt + asked.answer[1] - p.kv_tokens) / p.kv_tokens
        return (
            (replica.work + uncached) * per_token
            + uncached * per_token * HARM * others
            + others * BATCH * p.t1 / 1e3
            + load
            + over * 0.05
            + full * 20.0
        )


HARM = 0.02
BATCH = 32.0
