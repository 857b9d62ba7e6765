"""Traffic for replays of routing rules: a public trace, and generated kinds."""

import heapq
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.bench.routing_engine import Asked, Block

_HEAD_TOKENS = 256
"""Of the system prompt and of the first user message that the head has (1,024 characters)."""


def mooncake(
    folder: Path,
    requests: int,
    speed: float,
    gateways: int,
    *,
    name: str = "mooncake_conversation_trace.jsonl",
    seed: int = 7,
    shared_blocks: int = 1,
) -> list[Asked]:
    """A trace of Mooncake: blocks of 512 tokens. The first `shared_blocks` are the same in all requests: the system
    prompt. The head is these and one more. A prompt that has all of an earlier one in it is a later turn of its
    conversation."""
    dice = random.Random(seed)  # noqa: S311
    found: list[Asked] = []
    asked_before: dict[int, int] = {}
    """By the last whole block of a prompt: its tokens with its answer."""
    with (folder / name).open() as lines:
        for number, line in enumerate(lines):
            if number >= requests:
                break
            each = json.loads(line)
            left, blocks = each["input_length"], list[Block]()
            for block in each["hash_ids"]:
                blocks.append((block, min(512, left)))
                left -= 512
            answer = ((1 << 40) + number, max(1, each["output_length"]))
            at = each["timestamp"] / 1e3 / speed
            head = hash(tuple(each["hash_ids"][: shared_blocks + 1]))
            repeated, names, ends = 0, each["hash_ids"], list[int]()
            for at_block in range(len(names) - 1, 0, -1):
                if names[at_block] in asked_before:
                    repeated = min(each["input_length"] - 1, asked_before[names[at_block]])
                    ends.append(at_block + 1)
                    break
            if (whole := each["input_length"] // 512) > 1:
                asked_before[names[whole - 1]] = each["input_length"] + each["output_length"]
                ends.append(whole)
            gateway, system = dice.randrange(gateways), each["hash_ids"][0] if shared_blocks else None
            found.append(
                Asked(
                    number,
                    at,
                    tuple(blocks),
                    answer,
                    head,
                    repeated,
                    gateway=gateway,
                    system=system,
                    system_tokens=512 * shared_blocks,
                    ends=tuple(ends),
                )
            )
    # The trace has steps of 3 s: requests of one step come spread over it.
    spread = sorted((a.at + dice.random() * 3.0 / speed, a) for a in found)
    return [replace(a, number=n, at=at) for n, (at, a) in enumerate(spread)]


def conversations(
    requests: int,
    rate: float,
    gateways: int,
    *,
    systems: int,
    system_tokens: tuple[int, ...],
    turns: float,
    question: tuple[int, int],
    answers: tuple[int, int],
    pause: float = 30.0,
    adapters: int = 0,
    seed: int = 3,
) -> list[Asked]:
    """Conversations that begin with one of some system prompts; `turns` is their mean number of turns. With `adapters`
    each system prompt belongs to one adapter."""
    return list(
        _conversations(
            requests, rate, gateways, systems, system_tokens, turns, question, answers, pause, adapters, seed
        )
    )


def _conversations(
    requests: int,
    rate: float,
    gateways: int,
    systems: int,
    system_tokens: tuple[int, ...],
    turns: float,
    question: tuple[int, int],
    answers: tuple[int, int],
    pause: float,
    adapters: int,
    seed: int,
) -> Iterator[Asked]:
    dice = random.Random(seed)  # noqa: S311
    names = iter(range(1 << 30, 1 << 40))
    prompts: list[Block] = [(next(names), dice.choice(system_tokens)) for _ in range(systems)]
    due: list[tuple[float, int, int, int, tuple[Block, ...], int]] = []
    now = 0.0
    for number in range(requests):
        now += dice.expovariate(rate)
        if due and due[0][0] <= now:
            _, _, left, which, blocks, head = heapq.heappop(due)
            repeated = sum(tokens for _, tokens in blocks)
        else:
            which = min(int(dice.paretovariate(0.8)) - 1, 1 << 30) % systems
            blocks = (prompts[which],) if prompts[which][1] else ()
            left, head, repeated = max(1, round(dice.expovariate(1 / turns))), 0, 0
        asked = (next(names), length(dice, question))
        blocks += (asked,)
        head = head or hash((which, asked[0]))
        answer = (next(names), length(dice, answers))
        long = min(_HEAD_TOKENS, prompts[which][1]) + min(_HEAD_TOKENS, blocks[-1][1] if not repeated else 999) >= 64
        yield Asked(
            number,
            now,
            blocks,
            answer,
            head if long else None,
            repeated,
            which % adapters if adapters else None,
            dice.randrange(gateways),
            prompts[which][0] if prompts[which][1] >= 64 else None,
            prompts[which][1],
        )
        if left > 1:
            heapq.heappush(
                due, (now + 5.0 + dice.expovariate(1 / pause), number, left - 1, which, (*blocks, answer), head)
            )


def length(dice: random.Random, between: tuple[int, int]) -> int:
    """Log-uniform, as lengths of texts are skewed."""
    least, most = between
    return max(1, int(least * (most / least) ** dice.random()))
