"""A stretch of the Azure code trace as requests of one Model, in pieces with silence between them, so that it goes to
zero and wakes; and the client that asks."""

import asyncio
import csv
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import aiohttp
from tokenizers import Tokenizer

CODE: Final = "azure_llm_2023_code.csv"
LONGEST_PROMPT: Final = 3500
"""Tokens: the tiny model's context is 4,096. Longer ones of the trace are cut to it."""
_LONGEST: Final = 4000
"""Tokens of a prompt and its answer, for the same reason: an engine refuses more, and rightly so."""
_GIVE_UP_SECONDS: Final = 180.0
_WORDS: Final = "the fleet serves many models and each of them has its own replicas on nodes with free room "


@dataclass(frozen=True, slots=True)
class Ask:
    at: float
    """Seconds after the beginning."""
    prompt_tokens: int
    answer_tokens: int
    wakes: bool
    """The first after a silence."""


@dataclass(frozen=True, slots=True)
class Heard:
    ask: Ask
    outcome: str
    """answered, refused (429 or 503 with Retry-After), or lost."""
    first_seconds: float | None
    """From sending to the first byte of an answer."""


def pieces(folder: Path, *, speed: float, count: int, seconds: float, silence: float) -> list[Ask]:
    """`count` stretches of `seconds` of the trace, `speed` times as fast, `silence` seconds apart."""
    with (folder / CODE).open() as file:
        rows = list(csv.DictReader(file))
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
    found: list[Ask] = []
    for at, row in zip(times, rows, strict=True):
        piece, within = divmod((at - times[0]) / speed, seconds)
        if piece >= count:
            break
        prompt = min(LONGEST_PROMPT, max(1, int(row["ContextTokens"])))
        begin = piece * (seconds + silence) + silence
        wakes = not found or begin > found[-1].at + silence / 2
        answer = min(_LONGEST - prompt, max(1, int(row["GeneratedTokens"])))
        found.append(Ask(begin + within, prompt, answer, wakes))
    return found


class Client:
    """Open loop: each request at its time, whatever became of those before it."""

    def __init__(self, url: str, key: str, model: str, model_path: Path) -> None:
        self._url, self._key, self._model = f"{url}/v1/completions", key, model
        tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))
        self._text = _WORDS * (LONGEST_PROMPT // 8)
        self._ends = [end for _, end in tokenizer.encode(self._text).offsets]

    async def play(self, asks: Sequence[Ask]) -> list[Heard]:
        """What became of each, in their order."""
        timeout = aiohttp.ClientTimeout(total=_GIVE_UP_SECONDS)
        headers = {"Authorization": f"Bearer {self._key}"}
        connector = aiohttp.TCPConnector(limit=0)
        began = time.monotonic()
        tasks: list[asyncio.Task[Heard]] = []
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers, connector=connector) as session,
            asyncio.TaskGroup() as group,
        ):
            for number, ask in enumerate(asks):
                await asyncio.sleep(max(0.0, began + ask.at - time.monotonic()))
                tasks.append(group.create_task(self._one(session, number, ask)))
        return [task.result() for task in tasks]

    async def _one(self, session: aiohttp.ClientSession, number: int, ask: Ask) -> Heard:
        body: dict[str, Any] = {
            "model": self._model,
            # The number first: no prompt begins like another, as those of the trace do not.
            "prompt": f"{number} {self._text[: self._ends[ask.prompt_tokens - 1]]}",
            "max_tokens": ask.answer_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        began = time.monotonic()
        first: float | None = None
        done = False
        try:
            async with session.post(self._url, json=body) as response:
                if response.status != 200:
                    refused = response.status in (429, 503) and "Retry-After" in response.headers
                    return Heard(ask, "refused" if refused else "lost", None)
                async for line in response.content:
                    if line.startswith(b"data: "):
                        if b'"error"' in line:
                            return Heard(ask, "refused" if "retry_after" in line.decode() else "lost", first)
                        first = first or time.monotonic() - began
                        done = done or line.startswith(b"data: [DONE]")
        except (aiohttp.ClientError, TimeoutError, json.JSONDecodeError):
            return Heard(ask, "lost", first)
        return Heard(ask, "answered" if done else "lost", first)
