"""Clients that wait for each answer before they ask again: so many requests at once, behind prompts that fit only into
all caches together, as `bench_replicas --traffic prompts` asks them of real engines. A rule that has spread the prompts
over all replicas has more to compute, which keeps queues long, which spreads them on.

    python -m tests.bench.routing_closed [--requests 1500] [--seeds 101 102 103] [--gateways 2 8]

Virtual time; no traces are needed.
"""

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from tests.bench.bench_routing import RULES, Fresh, Result, advance, result
from tests.bench.routing_engine import Asked, Running, engine
from tests.bench.routing_loads import length
from tests.bench.routing_policies import Rule
from tests.bench.scaling_engine import Params

TICK_SECONDS = 0.005
"""Between two looks for answers that are complete."""
L40S = Params(24.2, 0.0646, 14.46, 0.000185, 2.93e-6, 0.2064, 190_048, 2048)


@dataclass(frozen=True, slots=True)
class Case:
    at_once: int
    prompts: int = 12
    prompt_tokens: int = 3000
    answers: tuple[int, int] = (12, 12)
    speed: int = 20_000
    """Prompt tokens per second of one engine."""
    replicas: int = 4
    kv_tokens: int = 20_000
    max_running: int = 16

    @property
    def engine(self) -> Params:
        per_token = 1000.0 / self.speed
        steps = replace(L40S, t0=min(L40S.t0, 300 * per_token), t1=per_token, t2=2.0)
        return replace(steps, kv_tokens=self.kv_tokens, max_running=self.max_running)


CASES = {
    "12 at once": Case(12),
    "40 at once": Case(40),
    "12 at once, fast engines": Case(12, speed=60_000),
    "40 at once, fast engines": Case(40, speed=60_000),
    "40 at once, 24 shorter prompts": Case(40, prompts=24, prompt_tokens=1500),
    "40 at once, longer answers": Case(40, answers=(12, 120)),
    "80 at once, 40 prompts, 8 larger replicas": Case(
        80, prompts=40, answers=(12, 60), replicas=8, kv_tokens=40_000, max_running=32
    ),
    "40 at once, caches that hold all prompts": Case(40, kv_tokens=160_000),
    "40 at once, two prompts": Case(40, prompts=2),
    "40 at once, nothing shared": Case(40, prompts=2000, prompt_tokens=1500),
}


def questions(case: Case, count: int, gateways: int, seed: int) -> list[Asked]:
    """Single questions, each behind any of the prompts."""
    dice = random.Random(seed)  # noqa: S311
    names = iter(range(1 << 30, 1 << 40))
    prompts = [(next(names), case.prompt_tokens) for _ in range(case.prompts)]
    found: list[Asked] = []
    for number in range(count):
        prompt, question = dice.choice(prompts), (next(names), length(dice, (150, 450)))
        answer, head = (next(names), length(dice, case.answers)), hash((prompt[0], question[0]))
        gateway = dice.randrange(gateways)
        found.append(Asked(number, 0.0, (prompt, question), answer, head, 0, None, gateway, *prompt))
    return found


def replay(asked: Sequence[Asked], make: Callable[[int, int], Rule], case: Case, gateways: int) -> Result:
    """Each request is sent as soon as one of so many clients has its last answer."""
    engines = [engine(number, case.engine, "one", 0.0, 0) for number in range(case.replicas)]
    fresh = {each.number: Fresh(each.number) for each in engines}
    kinds = [make(number, gateways) for number in range(gateways)]
    free = [0.0] * case.at_once
    """When clients are free."""
    sent: list[Running] = []
    when: list[Asked] = []
    now = 0.0
    while len(sent) < len(asked):
        for each in engines:
            each.advance(now)
            for one in each.ended:
                heappush(free, one.done)
            advance(each, now, kinds, fresh[each.number])
        while free and free[0] <= now and len(sent) < len(asked):
            heappop(free)
            one = replace(asked[len(sent)], at=now)
            kind = kinds[one.gateway]
            for each in engines:
                kind.heard(each, now)
            chosen = kind.choose(one, engines, now)
            sent.append(chosen.send(one, now))
            when.append(one)
            kind.sent(one, chosen, now)
        now += TICK_SECONDS
    for each in engines:
        advance(each, 1e9, kinds, fresh[each.number])
    return result(when, sent, engines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[101, 102, 103])
    parser.add_argument("--gateways", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--rules", nargs="+", default=[rule for rule in RULES if rule.startswith(("smg", "Shoal"))])
    options = parser.parse_args()
    for gateways in options.gateways:
        print(f"\n{gateways} gateways, {options.requests:,} requests, seeds {options.seeds}: ")
        print("p99 and mean of the TTFT in seconds, prompt tokens from the cache")
        print(f"| traffic | {' | '.join(options.rules)} |")
        print(f"|---|{'---|' * len(options.rules)}")
        for name, case in CASES.items():
            cells: list[str] = []
            for rule in options.rules:
                found = [
                    replay(questions(case, options.requests, gateways, seed), RULES[rule], case, gateways)
                    for seed in options.seeds
                ]
                p99, mean, hit = (
                    sum(of) / len(found) for of in zip(*((r.p99, r.mean, r.hit) for r in found), strict=True)
                )
                cells.append(f"{p99:.2f}, {mean:.3f}, {100 * hit:.0f} %")
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
