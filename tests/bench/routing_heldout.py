"""Traffic by which no weight of the score was chosen: other kinds, other seeds, other engines, and traces of others.

The kinds of `bench_routing` with other seeds are here too. Each kind is made from a seed; of a trace the seed decides
only which gateway gets which request, and when within a step of the trace's clock.
"""

import csv
import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from tests.bench.routing_engine import Asked, Block
from tests.bench.routing_loads import conversations, length, mooncake

Make = Callable[[int, int, int], list[Asked]]
"""Traffic by number of requests, gateways, and seed."""
_MANY = 1 << 40


def agents(rate: float) -> Make:
    """Loops of agents: tools in a long system prompt, results of tools that make the context grow, short answers, and
    the next call seconds later."""
    return lambda count, gateways, seed: _agents(count, rate, gateways, seed)


def _agents(count: int, rate: float, gateways: int, seed: int) -> list[Asked]:
    dice = random.Random(seed)  # noqa: S311
    names = iter(range(1 << 30, _MANY))
    tools = [(next(names), dice.choice((2500, 5000, 9000))) for _ in range(8)]
    due: list[tuple[float, int, int, int, tuple[Block, ...], int]] = []
    found: list[Asked] = []
    now = 0.0
    for number in range(count):
        now += dice.expovariate(rate)
        if due and due[0][0] <= now:
            _, _, left, which, blocks, head = heapq.heappop(due)
            repeated = sum(tokens for _, tokens in blocks)
        else:
            which, left = dice.randrange(len(tools)), 3 + int(dice.expovariate(1 / 14))
            blocks, head, repeated = (tools[which],), 0, 0
        # What a tool returned; the first message is the task.
        blocks += ((next(names), length(dice, (60, 600) if not repeated else (50, 4000))),)
        head = head or hash((which, blocks[-1][0]))
        answer = (next(names), length(dice, (20, 300)))
        found.append(_one(number, now, blocks, answer, head, repeated, dice.randrange(gateways), tools[which]))
        if left > 1:
            pause = 0.5 + answer[1] / 40 + dice.expovariate(1 / 3)
            heapq.heappush(due, (now + pause, number, left - 1, which, (*blocks, answer), head))
    return found


def jobs_and_chat(count: int, gateways: int, seed: int) -> list[Asked]:
    """People who chat, and each half minute a job of 150 requests with one instruction, long texts and long answers."""
    dice = random.Random(seed)  # noqa: S311
    chat = conversations(
        count * 3 // 4,
        16.0,
        gateways,
        systems=30,
        system_tokens=(0, 100, 600),
        turns=5,
        question=(20, 1200),
        answers=(50, 500),
        seed=seed,
    )
    jobs: list[Asked] = []
    at, end = 10.0, chat[-1].at
    names = iter(range(1 << 50, 1 << 51))
    while at < end:
        instruction = (next(names), dice.randrange(400, 1500))
        gateway = dice.randrange(gateways)
        for _ in range(150):
            text = (next(names), length(dice, (400, 3000)))
            answer = (next(names), length(dice, (80, 500)))
            head = hash((instruction[0], text[0]))
            when = at + dice.random() * 3.0
            jobs.append(_one(0, when, (instruction, text), answer, head, 0, gateway, instruction))
        at += 30.0
    return _numbered((*chat, *(j for j in jobs if j.at < end)))


def documents(count: int, gateways: int, seed: int) -> list[Asked]:
    """Questions about five documents each, of which some come often, in an order that says nothing: only the system
    prompt and the first documents can be found again, although the head may have been seen before."""
    dice = random.Random(seed)  # noqa: S311
    texts = [dice.randrange(300, 1100) for _ in range(400)]
    system: Block = (1 << 30, 350)
    names = iter(range(1 << 50, 1 << 51))
    found: list[Asked] = []
    now = 0.0
    for number in range(count):
        now += dice.expovariate(13.0)
        chosen: list[int] = []
        while len(chosen) < 5:
            one = (int(dice.paretovariate(0.7)) - 1) % len(texts)
            if one not in chosen:
                chosen.append(one)
        dice.shuffle(chosen)
        blocks: list[Block] = [system]
        for at, one in enumerate(chosen):
            blocks.append((hash((7, *chosen[: at + 1])), texts[one]))
        blocks.append((next(names), dice.randrange(15, 80)))
        answer = (next(names), length(dice, (40, 350)))
        head = hash((system[0], chosen[0]))
        found.append(_one(number, now, tuple(blocks), answer, head, 0, dice.randrange(gateways), system))
    return found


def bursts(count: int, gateways: int, seed: int) -> list[Asked]:
    """Conversations whose requests come in bursts: 8 s of each half minute have most of them."""
    calm = conversations(
        count,
        22.0,
        gateways,
        systems=50,
        system_tokens=(0, 60, 400),
        turns=5,
        question=(20, 1500),
        answers=(50, 600),
        seed=seed,
    )

    def moved(at: float) -> float:
        whole, rest = divmod(at, 30.0)
        # 60 % of the requests of half a minute in its first 8 s.
        return whole * 30.0 + (rest * 8.0 / 18.0 if rest < 18.0 else 8.0 + (rest - 18.0) * 22.0 / 12.0)

    return [replace(one, at=moved(one.at)) for one in calm]


def lengths(count: int, gateways: int, seed: int) -> list[Asked]:
    """Unique prompts, most of them short, and one of twelve very long."""
    dice = random.Random(seed)  # noqa: S311
    names = iter(range(1 << 30, _MANY))
    found: list[Asked] = []
    now = 0.0
    for number in range(count):
        now += dice.expovariate(24.0)
        prompt = (next(names), length(dice, (6000, 24_000) if dice.random() < 1 / 12 else (50, 800)))
        answer = (next(names), length(dice, (20, 400)))
        found.append(_one(number, now, (prompt,), answer, prompt[0], 0, dice.randrange(gateways), None))
    return found


def chat(rate: float) -> Make:
    """Conversations with other lengths and pauses than those of `bench_routing`."""
    return lambda count, gateways, seed: conversations(
        count,
        rate,
        gateways,
        systems=40,
        system_tokens=(0, 200, 900),
        turns=7,
        question=(30, 2500),
        answers=(30, 700),
        pause=18.0,
        seed=seed,
    )


def behind_prompts(rate: float) -> Make:
    """Single questions behind a dozen long prompts, as `bench_replicas --traffic prompts` asks them."""
    return lambda count, gateways, seed: conversations(
        count,
        rate,
        gateways,
        systems=12,
        system_tokens=(3000,),
        turns=0.01,
        question=(150, 450),
        answers=(12, 60),
        seed=seed,
    )


def short(rate: float) -> Make:
    """Unique prompts of medium length."""
    return lambda count, gateways, seed: conversations(
        count,
        rate,
        gateways,
        systems=1,
        system_tokens=(0,),
        turns=0.01,
        question=(100, 2500),
        answers=(20, 500),
        seed=seed,
    )


def coding(folder: Path, speed: float) -> Make:
    """Azure's trace of code completion: real arrivals and lengths. It says nothing of prefixes, so prompts are unique
    here."""

    def make(count: int, gateways: int, seed: int) -> list[Asked]:
        dice = random.Random(seed)  # noqa: S311
        found: list[Asked] = []
        start: datetime | None = None
        skip = (seed * 1500) % 5000
        with (folder / "azure_llm_2023_code.csv").open() as lines:
            for number, row in enumerate(csv.DictReader(lines)):
                if number < skip:
                    continue
                when = datetime.fromisoformat(row["TIMESTAMP"][:26])
                start = start or when
                at = (when - start).total_seconds() / speed + dice.random() * 1e-3
                prompt = ((1 << 30) + number, max(1, int(row["ContextTokens"])))
                answer = ((1 << 40) + number, max(1, int(row["GeneratedTokens"])))
                found.append(_one(0, at, (prompt,), answer, prompt[0], 0, dice.randrange(gateways), None))
                if len(found) >= count:
                    break
        return _numbered(found)

    return make


def questions(folder: Path, speed: float) -> Make:
    """Mooncake's synthetic trace: long documents, of which each is asked about several times."""
    return lambda count, gateways, seed: mooncake(
        folder, count, speed, gateways, name="mooncake_synthetic_trace.jsonl", seed=seed, shared_blocks=0
    )


def _one(
    number: int,
    at: float,
    blocks: tuple[Block, ...],
    answer: Block,
    head: int,
    repeated: int,
    gateway: int,
    system: Block | None,
) -> Asked:
    return Asked(
        number,
        at,
        blocks,
        answer,
        head if sum(tokens for _, tokens in blocks) >= 64 else None,
        repeated,
        gateway=gateway,
        system=None if system is None else system[0],
        system_tokens=0 if system is None else system[1],
    )


def _numbered(asked: Sequence[Asked] | Iterator[Asked]) -> list[Asked]:
    return [replace(one, number=n) for n, one in enumerate(sorted(asked, key=lambda a: a.at))]
