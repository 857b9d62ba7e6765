"""What prefix affinity is worth: conversations and questions on documents, over replicas with caches of their own, by
routing rule; what it costs per request; and what keeping tenants' prompts apart costs.

Virtual time; each replica keeps what its engine's radix cache would, by least recent use, in tokens. A gateway sees
only what it sent itself. No request is slowed down by another one: hit rate and evenness of the load, not latency.

python -m tests.bench.bench_prefix [--requests 40000] [--replicas 8] [--gateways 2] [--cache 200000]
"""

import argparse
import heapq
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.core.routing.affinity import favourite, head_of

Segments = tuple[tuple[int, int], ...]
"""A prompt: (what, how many tokens), from its beginning on."""
_LETTERS = 4
"""Of a token."""


@dataclass(frozen=True, slots=True)
class Asked:
    at: float
    head: int | None
    prompt: Segments
    answer: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Tenancy:
    at: float
    tenant: int
    prompt: Segments
    answer: tuple[int, int]


@dataclass(slots=True)
class Cache:
    """Prefixes, by least recent use."""

    most: int
    kept: OrderedDict[Segments, int] = field(default_factory=OrderedDict[Segments, int])
    held: int = 0

    def ask(self, prompt: Segments) -> int:
        """Tokens of the prompt that it has; it has all of them afterwards."""
        prefixes = [prompt[: n + 1] for n in range(len(prompt))]
        hit = 0
        for prefix in prefixes:
            if prefix not in self.kept:
                break
            hit += prefix[-1][1]
        for prefix in reversed(prefixes):  # the beginning is the youngest: it goes after what follows it
            if prefix not in self.kept:
                self.kept[prefix] = prefix[-1][1]
                self.held += prefix[-1][1]
            self.kept.move_to_end(prefix)
        while self.held > self.most:
            _, tokens = self.kept.popitem(last=False)
            self.held -= tokens
        return hit


def traffic(requests: int, dice: random.Random) -> Iterator[Asked]:
    """20 system prompts of 4 tenants; two thirds conversations of 1 to 12 turns, one third questions on documents."""
    names = iter(range(1 << 30))
    systems = [(next(names), dice.choice((60, 400, 1500, 3000))) for _ in range(20)]
    documents = [(next(names), dice.randrange(2_000, 16_000)) for _ in range(300)]
    now = 0.0
    due: list[tuple[float, int, Segments, int]] = []
    for _ in range(requests):
        now += dice.expovariate(40.0)
        if due and due[0][0] <= now:
            _, turns, prompt, which = heapq.heappop(due)
        else:
            which = dice.randrange(len(systems))
            prompt, turns = (systems[which],), min(12, 1 + int(dice.expovariate(0.3)))
            if dice.random() < 1 / 3:
                document = documents[min(int(dice.paretovariate(0.7)) - 1, len(documents) - 1)]
                prompt, turns = (systems[which], document), 1
        prompt += ((next(names), dice.randrange(20, 400)),)
        first = next(s for s in prompt[1:])
        texts = [f"{name}:".ljust(tokens * _LETTERS, "x") for name, tokens in (prompt[0], first)]
        messages = [{"role": role, "content": text} for role, text in zip(("system", "user"), texts, strict=True)]
        answer = (next(names), dice.randrange(50, 500))
        yield Asked(now, head_of(f"tenant-{which % 4}", {"messages": messages}), prompt, answer)
        if turns > 1:
            heapq.heappush(due, (now + dice.expovariate(1 / 20), turns - 1, (*prompt, answer), which))


Rule = Callable[[Asked, Sequence[int]], int]


def run(asked: Sequence[Asked], rule: Rule, replicas: int, gateways: int, cache: int) -> tuple[float, float, float]:
    """Share of prompt tokens found in a cache; requests in flight at the busiest replica over the mean: the mean of
    that, and its largest while there were 40 or more."""
    caches = [Cache(cache) for _ in range(replicas)]
    own = [[0] * replicas for _ in range(gateways)]
    running: list[tuple[float, int, int]] = []
    hit = tokens = 0
    uneven: list[float] = []
    for number, one in enumerate(asked):
        while running and running[0][0] <= one.at:
            _, gateway, at = heapq.heappop(running)
            own[gateway][at] -= 1
        gateway = number % gateways
        at = rule(one, own[gateway])
        own[gateway][at] += 1
        found = caches[at].ask(one.prompt)
        length = sum(n for _, n in one.prompt)
        caches[at].ask((*one.prompt, one.answer))
        hit, tokens = hit + found, tokens + length
        heapq.heappush(running, (one.at + (length - found) / 8_000 + one.answer[1] / 50, gateway, at))
        loads = [sum(of) for of in zip(*own, strict=True)]
        if sum(loads) >= 40:
            uneven.append(max(loads) * replicas / sum(loads))
    return hit / tokens, sum(uneven) / max(1, len(uneven)), max(uneven, default=0.0)


def tenancy(requests: int, tenants: int, share: float, dice: random.Random) -> Iterator[Tenancy]:
    """`traffic` of many tenants: a share of the conversations begins with one system prompt that all of them have (the
    product's own), the others with their tenant's."""
    names = iter(range(1 << 30))
    product, own = (next(names), 1500), [(next(names), 1500) for _ in range(tenants)]
    now = 0.0
    due: list[tuple[float, int, Segments, int]] = []
    for _ in range(requests):
        now += dice.expovariate(40.0)
        if due and due[0][0] <= now:
            _, turns, prompt, who = heapq.heappop(due)
        else:
            who = min(int(dice.paretovariate(0.9)) - 1, 1 << 30) % tenants
            prompt = (product if dice.random() < share else own[who],)
            turns = min(12, 1 + int(dice.expovariate(0.3)))
        prompt += ((next(names), dice.randrange(20, 400)),)
        answer = (next(names), dice.randrange(50, 500))
        yield Tenancy(now, who, prompt, answer)
        if turns > 1:
            heapq.heappush(due, (now + dice.expovariate(1 / 20), turns - 1, (*prompt, answer), who))


def isolation(requests: int, count: int, gateways: int, cache: int) -> None:
    """The same requests with and without a salt, side by side."""
    uids = [f"2f6c1f0e-0000-4000-8000-{n:012}" for n in range(count)]
    pods: list[Any] = list(range(count))

    def affine(one: Asked, loads: Sequence[int]) -> int:
        return favourite(one.head or 0, pods, uids, loads)

    print("\n| tenants | conversations on a shared system prompt | before | Tenant | Shared |\n|---|---|---|---|---|")
    for tenants, share in ((1, 0.0), (1, 1.0), (20, 0.0), (20, 0.5), (20, 1.0), (500, 1.0)):
        trace = list(tenancy(requests, tenants, share, random.Random(4)))  # noqa: S311
        found: list[str] = []
        # Before: the engine's cache was everybody's, and heads were a tenant's own.
        for salted, headed in ((False, True), (True, True), (False, False)):
            asked: list[Asked] = []
            for one in trace:
                texts = [f"{name}:".ljust(tokens * _LETTERS, "x") for name, tokens in one.prompt[:2]]
                messages = [{"role": r, "content": t} for r, t in zip(("system", "user"), texts, strict=True)]
                salt = (((1 << 31) + one.tenant, 0),) if salted else ()
                head = head_of(f"tenant/{one.tenant}" if headed else "", {"messages": messages})
                asked.append(Asked(one.at, head, (*salt, *one.prompt), one.answer))
            found.append(f"{100 * run(asked, affine, count, gateways, cache)[0]:.1f} %")
        print(f"| {tenants} | {100 * share:.0f} % | {' | '.join(found)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=40_000)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument("--cache", type=int, default=200_000, help="tokens of one replica")
    options = parser.parse_args()
    asked = list(traffic(options.requests, random.Random(1)))  # noqa: S311
    dice = random.Random(2)  # noqa: S311
    count = options.replicas
    pods: list[Any] = list(range(count))
    uids = [f"2f6c1f0e-0000-4000-8000-{n:012}" for n in pods]

    def least(_: Asked, loads: Sequence[int]) -> int:
        fewest = min(loads)
        return dice.choice([n for n, load in enumerate(loads) if load == fewest])

    def affine(one: Asked, loads: Sequence[int]) -> int:
        return least(one, loads) if one.head is None else favourite(one.head, pods, uids, loads)

    rules: dict[str, Rule] = {
        "random": lambda _, loads: dice.randrange(len(loads)),
        "least in flight": least,
        "head, bounded load": affine,
        "head, whatever the load": lambda one, _: favourite(one.head or 0, pods, uids, [0] * count),
    }
    endless = run(asked, lambda *_: 0, 1, 1, 1 << 62)[0]
    print(f"{len(asked):,} requests, {count} replicas of {options.cache:,} tokens, {options.gateways} gateways;")
    print(f"one replica that forgets nothing would find {100 * endless:.1f} % of the prompts' tokens")
    print("| rule | found in a cache | busiest over mean: mean | most |\n|---|---|---|---|")
    for name, rule in rules.items():
        found, mean, most = run(asked, rule, count, options.gateways, options.cache)
        print(f"| {name} | {100 * found:.1f} % | {mean:.2f} | {most:.2f} |")
    isolation(options.requests, count, options.gateways, options.cache)
    for length in (400, 40_000):
        fields = {"messages": [{"role": r, "content": "x" * length} for r in ("system", "user")]}
        head = head_of("acme", fields) or 0
        began = time.process_time()
        for _ in range(20_000):
            head_of("acme", fields)
        took = (time.process_time() - began) / 20_000 * 1e6
        began = time.process_time()
        for _ in range(20_000):
            favourite(head, pods, uids, [3] * count)
        chosen = (time.process_time() - began) / 20_000 * 1e6
        print(f"head of two messages of {length:,} letters: {took:.1f} us; choice among {count}: {chosen:.1f} us")


if __name__ == "__main__":
    main()
