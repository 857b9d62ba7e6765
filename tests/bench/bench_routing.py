"""What routing is worth: time to first token, prefix hits and throughput by routing rule, over traffic with and without
structure. Virtual time; the rules of other routers are models of them."""

import argparse
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench import routing_policies as rules
from tests.bench.routing_engine import Asked, Replica, Running
from tests.bench.routing_engine import engine as new_engine
from tests.bench.routing_loads import conversations, mooncake
from tests.bench.routing_policies import Report, Rule, uid_of
from tests.bench.scaling_engine import Params, params

TRACES = Path(os.environ.get("SHOAL_TRACES", "../shared/traces"))
REPORT_SECONDS = 1.0
"""Between two reports of an agent; a queue that begins or a jump of the KV cache is reported sooner."""
SOON_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Fleet:
    gpus: tuple[str, ...]
    slow: tuple[int, ...] = ()
    """Replicas of half the speed."""
    events: tuple[tuple[float, str, int], ...] = ()
    """(when, "join" or "leave", which replica)."""
    places: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    hit: float
    p50: float
    p99: float
    mean: float
    tokens_per_second: float
    loads: int


class Fresh:
    """When each engine was reported last, and how."""

    def __init__(self, number: int) -> None:
        self.next = REPORT_SECONDS * (0.1 + number * 0.37 % 1.0)
        self.at = 0.0
        self.waiting = 0
        self.kv = 0.0
        self.generated = 0

    def due(self, replica: Replica, now: float) -> bool:
        if now >= self.next:
            return True
        if now - self.at < SOON_SECONDS:
            return False
        return (
            bool(replica.waiting) != bool(self.waiting)
            or abs(replica.kv_used / replica.params.kv_tokens - self.kv) > 0.02
        )


def replay(asked: Sequence[Asked], make: Callable[[int, int], Rule], fleet: Fleet, gateways: int) -> Result:
    engines: list[Replica] = []
    fresh: dict[int, Fresh] = {}
    events = sorted(fleet.events)
    joins = {which for _, what, which in events if what == "join"}

    def start(number: int, now: float) -> None:
        engines.append(
            new_engine(number, _params(fleet, number), fleet.gpus[number].partition(":")[0], now, fleet.places)
        )
        fresh[number] = Fresh(number)
        fresh[number].next += now
        fresh[number].at = now

    for number in range(len(fleet.gpus)):
        if number not in joins:
            start(number, 0.0)
    kinds = [make(n, gateways) for n in range(gateways)]
    sent: list[Running] = []
    for one in asked:
        while events and events[0][0] <= one.at:
            when, what, which = events.pop(0)
            if what == "join":
                start(which, when)
            else:
                next(e for e in engines if e.number == which).leaving = True
        for engine in engines:
            _advance(engine, one.at, kinds, fresh[engine.number])
        able = [e for e in engines if not e.leaving]
        kind = kinds[one.gateway]
        replica = kind.choose(one, able, one.at)
        sent.append(replica.send(one, one.at))
        kind.sent(one, replica, one.at)
    for engine in engines:
        _advance(engine, 1e9, kinds, fresh[engine.number])
    return _result(asked, sent, engines)


def _params(fleet: Fleet, number: int) -> Params:
    found = params(TRACES, fleet.gpus[number])
    return found.scaled(2.0) if number in fleet.slow else found


def _advance(engine: Replica, now: float, kinds: Sequence[Rule], fresh: Fresh) -> None:
    engine.advance(now)
    for one in engine.began:
        if one.asked is not None:
            kinds[one.asked.gateway].began(one, engine)
    for one in engine.ended:
        if one.asked is not None:
            kinds[one.asked.gateway].ended(one, engine)
    engine.began.clear()
    engine.ended.clear()
    if fresh.due(engine, now) and now < 1e9:
        passed = max(1e-3, now - fresh.at)
        known = Report(
            now,
            engine.running,
            len(engine.waiting) + len(engine.loading),
            engine.uncached_waiting,
            engine.kv_used,
            engine.params.kv_tokens,
            engine.params.max_running,
            (engine.generated_tokens - fresh.generated) / passed,
            frozenset(engine.adapters) if engine.places else frozenset(),
        )
        fresh.next, fresh.at, fresh.waiting = now + REPORT_SECONDS, now, len(engine.waiting)
        fresh.kv, fresh.generated = engine.kv_used / engine.params.kv_tokens, engine.generated_tokens
        for kind in kinds:
            kind.reported(uid_of(engine), known)


def _result(asked: Sequence[Asked], sent: Sequence[Running], engines: Sequence[Replica]) -> Result:
    cold = len(asked) // 10  # caches and what was learned are empty at first, for every rule
    waits = sorted(one.first - a.at for one, a in zip(sent[cold:], asked[cold:], strict=True))
    prompt = sum(a.prompt for a in asked)
    tokens = prompt + sum(a.answer[1] for a in asked)
    last = max(one.done for one in sent)
    return Result(
        sum(one.cached for one in sent[cold:]) / sum(a.prompt for a in asked[cold:]),
        waits[len(waits) // 2],
        waits[int(len(waits) * 0.99)],
        sum(waits) / len(waits),
        tokens / (last - asked[0].at),
        sum(e.loads for e in engines),
    )


RULES: dict[str, Callable[[int, int], Rule]] = {
    "round robin": rules.RoundRobin,
    "least in flight": rules.LeastInFlight,
    "smg cache_aware (model)": rules.CacheAware,
    "smg least_load (model)": rules.LeastLoad,
    "Shoal before": rules.Before,
    "Shoal": rules.Scored,
    "ideal": rules.Ideal,
}


def loads(count: int, gateways: int) -> dict[str, tuple[list[Asked], Fleet]]:
    """Traffic and the fleet for it, by name."""
    l40s = ("l40s:bfloat16",) * 8
    h100 = "h100_sxm:bfloat16"
    found: dict[str, tuple[list[Asked], Fleet]] = {}
    if (TRACES / "mooncake_conversation_trace.jsonl").exists():
        found["Mooncake conversation"] = (mooncake(TRACES, 4 * count, 1.0, gateways), Fleet((h100,) * 6))
    chat = conversations(
        count, 36.0, gateways, systems=50, system_tokens=(0, 60, 400), turns=5, question=(20, 1500), answers=(50, 600)
    )
    found["multi-turn, as ShareGPT"] = (chat, Fleet(l40s))
    shared = conversations(
        count,
        22.0,
        gateways,
        systems=100,
        system_tokens=(1500, 3000, 6000),
        turns=1,
        question=(20, 400),
        answers=(20, 300),
    )
    found["shared system prompts"] = (shared, Fleet(l40s))
    adapters = conversations(
        count,
        24.0,
        gateways,
        systems=2000,
        system_tokens=(200, 800, 1500),
        turns=2,
        question=(20, 400),
        answers=(20, 300),
        adapters=2000,
    )
    found["2,000 adapters"] = (adapters, Fleet(l40s, places=200))
    unique = conversations(
        count, 24.0, gateways, systems=1, system_tokens=(0,), turns=0.01, question=(300, 4000), answers=(20, 400)
    )
    found["unique single-turn"] = (unique, Fleet(l40s))
    found["multi-turn, one at half speed"] = (chat, Fleet(l40s, slow=(3,)))
    found["unique, one at half speed"] = (unique, Fleet(l40s, slow=(3,)))
    end = chat[-1].at
    moves = ((end * 0.25, "leave", 1), (end * 0.4, "join", 8), (end * 0.6, "leave", 4), (end * 0.7, "join", 9))
    found["multi-turn, joins and leaves"] = (chat, Fleet((*l40s, *l40s[:2]), events=moves))
    found["multi-turn, L40S and H100"] = (chat, Fleet((*l40s[:4], h100)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--gateways", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--only", default="", help="traffic whose name contains this")
    parser.add_argument("--rules", default="", help="rules whose name contains one of these, comma-separated")
    options = parser.parse_args()
    random.seed(1)
    wanted = options.rules.split(",")
    for gateways in options.gateways:
        for name, (asked, fleet) in loads(options.requests, gateways).items():
            if options.only not in name:
                continue
            print(f"\n{name}: {len(asked):,} requests, {len(fleet.gpus)} replicas, {gateways} gateways")
            print("| rule | hits | TTFT p50 | p99 | mean | tokens/s | p99 to best other | CPU s |")
            print("|---|---|---|---|---|---|---|---|")
            results: dict[str, Result] = {}
            seconds: dict[str, float] = {}
            for rule, make in RULES.items():
                if not any(w in rule for w in wanted):
                    continue
                began = time.process_time()
                results[rule] = replay(asked, make, fleet, gateways)
                seconds[rule] = time.process_time() - began
            for rule, one in results.items():
                others = [r.p99 for n, r in results.items() if n != "ideal" and n != rule]
                ratio = f"{one.p99 / min(others):.2f}" if others else ""
                print(
                    f"| {rule} | {100 * one.hit:.1f} % | {one.p50:.3f} s | {one.p99:.3f} s | {one.mean:.3f} s "
                    f"| {one.tokens_per_second:,.0f} | {ratio} | {seconds[rule]:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
