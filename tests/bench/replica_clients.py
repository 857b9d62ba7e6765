"""The clients of `bench_replicas`: a number of them ask at once, each again as soon as it has its answer. They count
and time what they see."""

import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

import aiohttp

from tests.bench.replica_traffic import Talk
from tests.support.engines import API_KEY, SERVED

HOME_HEADER: Final = "x-bench-home"
"""With each request: the engine to which the rule "by conversation" sends it, as a number. Other routers know nothing
of it."""
ANSWER_TOKENS: Final = 12
THINK_SECONDS: Final = 2.0
"""Between an answer and the next turn, at most."""
IDLE_SECONDS: Final = 2.0
"""For which a client keeps a connection: fewer than any server, which would close it under a request."""


@dataclass(frozen=True, slots=True)
class Entrance:
    """Where clients ask, and how."""

    urls: tuple[str, ...]
    """Clients take turns with them."""
    key: str = API_KEY
    model: str = SERVED
    names_adapter: Literal["lora_path", "model"] = "lora_path"
    """The field that does."""


@dataclass(frozen=True, slots=True)
class Answer:
    began: float
    """When it was asked for, in seconds of a monotonic clock."""
    seconds: float
    """Until the first token."""
    prompt: int
    cached: int
    text: str


def session_of_clients() -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300))


async def all_ask(
    session: aiohttp.ClientSession, entrance: Entrance, talks: Sequence[Talk], at_once: int, engines: int
) -> tuple[list[Answer], int]:
    """All answers, and how many conversations failed."""
    slots = asyncio.Semaphore(at_once)
    answers: list[Answer] = []

    async def one(talk: Talk) -> bool:
        async with slots:
            return await _converse(session, entrance, talk, engines, answers)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(talk)) for talk in talks]
    return answers, sum(not task.result() for task in tasks)


async def _converse(
    session: aiohttp.ClientSession, entrance: Entrance, talk: Talk, engines: int, answers: list[Answer]
) -> bool:
    """False: a request failed, so there are no further turns."""
    dice = random.Random(talk.number)  # noqa: S311 - every rule gets the same
    messages: list[dict[str, str]] = [{"role": "system", "content": talk.system}] if talk.system else []
    for turn, said in enumerate(talk.turns):
        messages.append({"role": "user", "content": said})
        url = entrance.urls[(talk.number * len(talk.turns) + turn) % len(entrance.urls)]
        try:
            answer = await _ask(session, url, entrance, messages, talk.adapter, talk.home(engines))
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            print(f"failed: {type(error).__name__} {error}", file=sys.stderr)
            return False
        answers.append(answer)
        messages.append({"role": "assistant", "content": answer.text})
        if turn + 1 < len(talk.turns):
            await asyncio.sleep(dice.random() * THINK_SECONDS)
    return True


async def _ask(
    session: aiohttp.ClientSession,
    url: str,
    entrance: Entrance,
    messages: Sequence[dict[str, str]],
    adapter: str | None,
    home: int,
) -> Answer:
    body: dict[str, Any] = {
        "model": entrance.model,
        "messages": messages,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if adapter is not None:
        body[entrance.names_adapter] = adapter
    began, first, said, usage = time.monotonic(), 0.0, "", dict[str, Any]()
    headers = {"authorization": f"Bearer {entrance.key}", HOME_HEADER: str(home)}
    async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
        if response.status != 200:
            raise ValueError(f"{response.status} {(await response.text())[:300]}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event: dict[str, Any] = json.loads(line[6:])
            choices = cast("list[dict[str, Any]]", event.get("choices") or [])
            for choice in choices:
                if content := choice.get("delta", {}).get("content"):
                    first = first or time.monotonic()
                    said += content
            usage = event.get("usage") or usage
    if not first or "prompt_tokens" not in usage:
        raise ValueError("the answer has no tokens or no usage")
    details: dict[str, Any] = usage.get("prompt_tokens_details") or {}
    return Answer(began, first - began, usage["prompt_tokens"], details.get("cached_tokens") or 0, said)
