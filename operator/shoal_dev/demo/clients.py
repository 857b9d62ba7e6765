"""Many clients at once: the `openai` SDK, streamed, without retries, so that nothing hides a refusal."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Final

import click
import httpx
import openai

TIMEOUT_SECONDS: Final = 120.0
FAILURES: Final = (openai.APIError, httpx.HTTPError)
"""The SDK passes on what breaks a stream as its HTTP client raises it."""


@dataclass(frozen=True, slots=True)
class DemoAnswer:
    """One answer as its client heard it."""

    first_seconds: float
    """From the request to the first token."""
    seconds: float


@dataclass
class DemoClients:
    """Clients that ask again and again until told to stop; each finishes what it began."""

    base_url: str
    api_key: str
    model: str
    answers: list[DemoAnswer] = field(default_factory=list[DemoAnswer])
    problems: list[str] = field(default_factory=list[str])
    """One sentence per request that was not answered whole."""
    enough: asyncio.Event = field(default_factory=asyncio.Event)

    async def one(self, tokens: int) -> DemoAnswer:
        """One request with an answer of `tokens` tokens. Raises ClickException with the API's own error."""
        async with self._client() as client:
            try:
                return await _ask(client, self.model, 0, tokens)
            except FAILURES as error:
                raise click.ClickException(f"the gateway answered: {error}") from error

    async def many(self, clients: int, tokens: int) -> None:
        """Runs so many clients until `enough` is set."""
        async with self._client() as client, asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(self._again_and_again(client, number, tokens))

    async def _again_and_again(self, client: openai.AsyncOpenAI, number: int, tokens: int) -> None:
        while not self.enough.is_set():
            try:
                self.answers.append(await _ask(client, self.model, number, tokens))
            except FAILURES as error:
                self.problems.append(str(error))
                await asyncio.sleep(1)

    def _client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.base_url}/v1", api_key=self.api_key, timeout=TIMEOUT_SECONDS, max_retries=0
        )


async def _ask(client: openai.AsyncOpenAI, model: str, number: int, tokens: int) -> DemoAnswer:
    began = time.monotonic()
    first: float | None = None
    ended = False
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": f"I am client {number}. Tell me something long."}],
        max_tokens=tokens,
        stream=True,
    )
    async with stream:
        async for chunk in stream:
            for choice in chunk.choices:
                if choice.delta.content and first is None:
                    first = time.monotonic()
                ended = ended or choice.finish_reason is not None
    if not ended or first is None:
        raise httpx.RemoteProtocolError("the stream ended before the answer did")
    return DemoAnswer(first - began, time.monotonic() - began)
