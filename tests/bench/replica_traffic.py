"""What clients ask in `bench_replicas`: kinds of traffic. Every rule gets the same in a round, and each round has its
own."""

import argparse
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final

from tests.bench import replica_adapters

MOONCAKE: Final = "mooncake_conversation_trace.jsonl"
BLOCK_WORDS: Final = 3
"""What a block of the trace becomes: its longest prompt, of 240 blocks, still fits into the context."""
WORDS: Final = (
    "river",
    "stone",
    "cloud",
    "paper",
    "engine",
    "window",
    "garden",
    "letter",
    "market",
    "bridge",
    "winter",
)


@dataclass(frozen=True, slots=True)
class Talk:
    """What one client says, turn by turn; the answers come between."""

    number: int
    conversation: int
    group: int
    """Of those that begin in the same way."""
    system: str | None
    turns: tuple[str, ...]
    adapter: str | None = None

    def home(self, engines: int) -> int:
        """The number of the engine that has all turns of the conversation in the rule "by conversation"; a system
        prompt has two such engines."""
        return (self.group + engines // 2 * (self.conversation % 2)) % engines


def text(dice: random.Random, words: int) -> str:
    return " ".join(dice.choice(WORDS) for _ in range(words))


def chat(asked: argparse.Namespace, number: int, dice: random.Random) -> list[Talk]:
    systems = [text(dice, asked.system_words) for _ in range(asked.systems)]
    talks: list[Talk] = []
    for at in range(asked.conversations):
        group = dice.randrange(len(systems))
        said = tuple(text(dice, dice.randrange(30, 90)) for _ in range(asked.turns))
        talks.append(Talk(at, at, group, systems[group], said))
    return talks


def prompts(asked: argparse.Namespace, number: int, dice: random.Random) -> list[Talk]:
    systems = [text(dice, 2 * asked.system_words) for _ in range(2 * asked.systems)]
    groups = [dice.randrange(len(systems)) for _ in range(asked.requests)]
    return [Talk(n, n, at, systems[at], (text(dice, dice.randrange(30, 90)),)) for n, at in enumerate(groups)]


def unique(asked: argparse.Namespace, number: int, dice: random.Random) -> list[Talk]:
    return [Talk(n, n, n, None, (text(dice, dice.randrange(50, 500)),)) for n in range(asked.requests)]


def mooncake(asked: argparse.Namespace, number: int, dice: random.Random) -> list[Talk]:
    """Each round has the next part of the trace."""
    words: dict[int, str] = {}
    talks: list[Talk] = []
    with (asked.traces / MOONCAKE).open() as lines:
        for at, line in enumerate(islice(lines, number * asked.requests, (number + 1) * asked.requests)):
            blocks: list[int] = json.loads(line)["hash_ids"]
            said = " ".join(words.setdefault(block, text(dice, BLOCK_WORDS)) for block in blocks)
            begins = blocks[min(1, len(blocks) - 1)]
            talks.append(Talk(at, begins, begins, None, (said,)))
    return talks


def with_adapters(asked: argparse.Namespace, number: int, dice: random.Random, *, zipf: bool = False) -> list[Talk]:
    systems: dict[int, str] = {}
    talks: list[Talk] = []
    for at, one in enumerate(replica_adapters.conversations(asked.requests, asked.seed + number, zipf=zipf)):
        system = systems.setdefault(one.adapter, text(dice, one.system))
        said = tuple(text(dice, words) for words in one.questions)
        talks.append(Talk(at, at, one.adapter, system, said, replica_adapters.short_name(one.adapter)))
    return talks


TRAFFIC: Final[dict[str, Callable[[argparse.Namespace, int, random.Random], list[Talk]]]] = {
    "chat": chat,
    "prompts": prompts,
    "unique": unique,
    "mooncake": mooncake,
    "adapters": with_adapters,
    "adapters-zipf": partial(with_adapters, zipf=True),
}


def talks_of(traffic: str, asked: argparse.Namespace, number: int) -> list[Talk]:
    """What the clients say in the round of this number."""
    dice = random.Random(1000 * asked.seed + number)  # noqa: S311 - every rule gets the same
    return TRAFFIC[traffic](asked, number, dice)
